"""A reward for a random model: the share of lower-case letters. It varies, and it can be learned."""


def letters(prompt, completion, answer):
    return sum(character.islower() for character in completion) / max(1, len(completion))
