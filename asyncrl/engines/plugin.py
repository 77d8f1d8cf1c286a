"""temporary"""


def activate() -> None: ...
