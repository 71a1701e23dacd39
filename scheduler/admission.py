"""What is refused when it arrives, because it could never run or would wait too long."""

from __future__ import annotations

from specdec.errors import ContextLengthError, OverloadedError, RequestError


def check_prompt(num_prompt: int, max_length: int) -> None:
    """Refuses a prompt that leaves no room for a token.

    Args:
        num_prompt: prompt tokens.
        max_length: tokens that the model's context and the KV pool can hold for one request.
    """
    if num_prompt == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    if num_prompt >= max_length:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but prompt and output together may have at most {max_length}: "
            f"shorten it to {max_length - 1} tokens or fewer, or serve with a larger max_model_len or KV pool"
        )


def check_queue(waiting: int, arriving: int, max_queue: int) -> None:
    """Refuses requests beyond the length of the queue."""
    if arriving > max_queue:
        raise RequestError(f"{arriving} choices at once can never wait together: at most {max_queue} may (max_queue)", param="n")
    if waiting + arriving > max_queue:
        raise OverloadedError(f"{waiting} requests are waiting and at most {max_queue} may: try again later")
