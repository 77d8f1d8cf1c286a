"""The four signatures of reward functions in use, recognised by their parameter names.

    verl     compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw)
    TRL      f(prompts, completions, completion_ids, **columns) -> list, a batch of one here
    AReaL    f(prompt, completions, prompt_ids, completion_ids, answer, **kw)
    plain    f(prompt, completion, answer, row, token_ids), any of these

`call_arguments` is pure: the keyword arguments that a function of a form receives for one request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["verl", "trl", "areal", "plain"]

PLAIN_NAMES = ("prompt", "completion", "answer", "row", "token_ids")
FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info), f(prompts, completions, ...),"
    " f(prompt, completions, prompt_ids, completion_ids, answer) or f(prompt, completion, answer)"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to score; ``prompt_text`` is the last user message."""

    messages: Sequence[Mapping[str, str]]
    prompt_ids: Sequence[int]
    row: Mapping[str, Any]
    completion: str
    token_ids: Sequence[int]

    @property
    def prompt_text(self) -> str:
        return self.messages[-1]["content"]


def recognise(function: Callable[..., Any]) -> Form:
    """The form of ``function``.

    Raises:
        ValueError: its parameters are those of no form.
    """
    parameters = inspect.signature(function).parameters
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    if "solution_str" in named:
        return "verl"
    if "completions" in named:
        return "areal" if "prompt" in named else "trl"
    required = {name for name in named if parameters[name].default is inspect.Parameter.empty}
    if "completion" in named and required <= set(PLAIN_NAMES):
        return "plain"
    raise ValueError(f"parameters ({', '.join(parameters)}) are of no known form; use {FORMS}")


def call_arguments(function: Callable[..., Any], form: Form, request: Request) -> dict[str, Any]:
    """The keyword arguments for one call, cut to those that the function takes."""
    available = {"verl": _verl, "trl": _trl, "areal": _areal, "plain": _plain}[form](request)
    parameters = inspect.signature(function).parameters.values()
    if form != "plain" and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return available
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in available.items() if name in names}


def _verl(request: Request) -> dict[str, Any]:
    return {
        "data_source": request.row.get("data_source"),
        "solution_str": request.completion,
        "ground_truth": request.row.get("answer"),
        "extra_info": request.row.get("extra_info"),
    }


def _trl(request: Request) -> dict[str, Any]:
    """Text in, text out where the row's prompt is text; messages otherwise, as TRL does."""
    as_text = isinstance(request.row.get("prompt"), str)
    completion: Any = request.completion
    return {
        **{name: [value] for name, value in request.row.items() if name != "prompt"},
        "prompts": [request.row["prompt"] if as_text else [dict(message) for message in request.messages]],
        "completions": [completion if as_text else [{"role": "assistant", "content": completion}]],
        "completion_ids": [list(request.token_ids)],
    }


def _areal(request: Request) -> dict[str, Any]:
    return {
        **{name: value for name, value in request.row.items() if name != "prompt"},
        "prompt": request.prompt_text,
        "completions": request.completion,
        "prompt_ids": list(request.prompt_ids),
        "completion_ids": list(request.token_ids),
        "answer": request.row.get("answer"),
    }


def _plain(request: Request) -> dict[str, Any]:
    return {
        "prompt": request.prompt_text,
        "completion": request.completion,
        "answer": request.row.get("answer"),
        "row": dict(request.row),
        "token_ids": list(request.token_ids),
    }
