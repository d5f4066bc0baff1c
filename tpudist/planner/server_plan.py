"""`ServerPlan`: time and memory of a language model that answers prompts on given devices."""

import dataclasses

from tpudist.planner import json_records
from tpudist.planner.plan_record import JSON_VERSION, Plan


@dataclasses.dataclass(frozen=True)
class ServerPlan:
    """Plans of the two steps of a server, and figures of complete answers.

    Attributes:
        prefill: Plan of the step that reads new prompts, with a cache of only these.
        decode: Plan of the step that adds a token to each sequence.
        prompt_length: Tokens of a prompt.
        output_length: Tokens of an answer.
        num_prompts: Prompts that a prefill step reads.
        num_sequences: Sequences that a decode step continues, of all chips together.
        max_sequences: Number of sequences that fit, by the memory of the compiled steps.
        fits: Whether both steps fit, a prefill step also next to the cache of all sequences.
        first_token_s: Time to the first token of a prompt that need not wait.
        token_s: Time of each further token, without prefill steps in between.
        tokens_per_s: New tokens per second of all chips, with prefill steps of new prompts between
            decode steps, and all sequences always in use.
    """

    prefill: Plan
    decode: Plan
    prompt_length: int
    output_length: int
    num_prompts: int
    num_sequences: int
    max_sequences: int
    fits: bool
    first_token_s: float | None
    token_s: float | None
    tokens_per_s: float | None

    def to_json(self) -> str:
        """Returns the plan as JSON; `from_json` reads it."""
        return json_records.dumps(self, JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "ServerPlan":
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: If the text is not such a plan, or another version of tpudist wrote it.
        """
        return json_records.loads(cls, text, JSON_VERSION)


def join(
    prefill: Plan,
    decode: Plan,
    *,
    prompt_length: int,
    output_length: int,
    num_prompts: int,
    num_sequences: int,
    num_groups: int,
    sequence_bytes: float,
) -> ServerPlan:
    """Returns the plan of a server from the plans of its steps.

    The sequences are split over `num_groups` groups of devices. The cache of a sequence has
    `sequence_bytes` on each device of its group.
    """
    # The largest number by each step. A prefill step has the cache of all sequences next to it.
    by_decode = num_sequences + num_groups * (free_bytes(decode) // sequence_bytes)
    by_prefill = num_groups * (free_bytes(prefill) // sequence_bytes)
    max_sequences = max(0, int(min(by_decode, by_prefill)))
    first_s = prefill.time.step_s if prefill.time else None
    token_s = decode.time.step_s if decode.time else None
    tokens_per_s = None
    if first_s is not None and token_s is not None:
        # Each sequence needs its share of a prefill step, which makes one token, and of one decode
        # step for each other token.
        spent_s = first_s / num_prompts + (output_length - 1) * token_s / num_sequences
        tokens_per_s = output_length / spent_s
    return ServerPlan(
        prefill,
        decode,
        prompt_length,
        output_length,
        num_prompts,
        num_sequences,
        max_sequences,
        fits=decode.fits and prefill.fits and max_sequences >= num_sequences,
        first_token_s=first_s,
        token_s=token_s,
        tokens_per_s=tokens_per_s,
    )


def free_bytes(plan: Plan) -> float:
    """Returns the free memory of a device; negative if the program does not fit."""
    if plan.refusal is not None:
        return float(-max(plan.refusal.over_bytes, 1))
    return float((plan.memory and plan.memory.free_bytes) or 0)
