"""Joins registrations that share a prompt into one message, and splits it again.

Each answer to a prompt is a separate stream with a self-contained registration. Consecutive ones
that differ only in the fields of `OtherAdmit` are sent to the core as one `Admit`, so that a prompt
is sent, decoded and checked once for all of its answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import structs

from slipstream_ipc.messages import MAX_OTHERS, Admit, OtherAdmit

MAX_JOINED_BYTES = 2**26  # prompt, outputs and logprobs of a message with several registrations


def joined(first: Admit, behind: Iterable[object]) -> tuple[Admit, int]:
    """`first` joined with as many of the registrations behind it as possible, and their number,
    `first` included.
    """
    others: list[OtherAdmit] = []
    num_bytes = len(first.prompt_ids) + _own_bytes(first)
    for admit in behind:
        if len(others) == MAX_OTHERS or not isinstance(admit, Admit):
            break
        num_bytes += _own_bytes(admit)
        if num_bytes > MAX_JOINED_BYTES or not _is_alike(first, admit):
            break
        others.append(_own(admit))
    if others:
        return structs.replace(first, others=tuple(others)), 1 + len(others)
    return first, 1


def registrations_of(admit: Admit) -> Iterator[Admit]:
    """The registrations in a message, each self-contained; they share the prompt's bytes object."""
    if not admit.others:
        yield admit
        return
    yield structs.replace(admit, others=())
    for other in admit.others:
        yield _with(admit, other)


def _is_alike(first: Admit, admit: Admit) -> bool:
    """True if `admit` differs from `first` only in the fields of `OtherAdmit`."""
    if len(first.prompt_ids) != len(admit.prompt_ids):
        return False
    # compares every other field, including any that is added to Admit later
    return _with(first, _own(admit)) == admit


def _own(admit: Admit) -> OtherAdmit:
    derived = admit.derived
    begun = structs.replace(admit.begun, prompt_logprobs=None)
    return OtherAdmit(admit.stream_id, derived.seed, derived.fingerprint, begun)


def _with(admit: Admit, own: OtherAdmit) -> Admit:
    return structs.replace(
        admit,
        stream_id=own.stream_id,
        derived=structs.replace(admit.derived, seed=own.seed, fingerprint=own.fingerprint),
        begun=structs.replace(own.begun, prompt_logprobs=admit.begun.prompt_logprobs),
        others=(),
    )


def _own_bytes(admit: Admit) -> int:
    columns = admit.begun.logprobs
    num_bytes = len(admit.begun.output_ids)
    if columns is not None:
        num_bytes += len(columns.values) + len(columns.ids) + len(columns.ranks)
    return num_bytes
