"""How many micro-batches a pipeline cuts a data rank's share of the global batch into."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.errors import UserError


def microbatches(
    local_batch: int, pp: int, asked: int | None, micro_batch: int | None, interleaved: bool, data_ranks: int = 1
) -> int:
    """The number of equal micro-batches of one step and data rank.

    They must be at least as many as the pipeline's ranks, or some of those never work at the same time, and under the
    interleaved schedule a multiple of them (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Args:
        local_batch: samples of one step and data rank.
        pp: pipeline ranks.
        asked: parallel.microbatches; None for the default.
        micro_batch: train.micro_batch, the samples of each, which gives the default; without it the default is the
            largest number that fits, up to twice the ranks.
        interleaved: whether the schedule is the interleaved one.
        data_ranks: data ranks that share the global batch, which a fault names.

    Raises:
        UserError: no number fits, or not the one asked for; names the nearest that do.
    """
    step = pp if interleaved else 1
    fitting = [n for n in range(pp, local_batch + 1) if local_batch % n == 0 and n % step == 0]
    kind = f"at least {pp}" + f" and a multiple of {pp}" * interleaved
    if not fitting:
        below = local_batch // pp * pp
        sizes = [share * data_ranks for share in (below, below + pp) if share]
        raise UserError(
            f"the {local_batch} samples of a data rank make no micro-batches that are equal, {kind}",
            f"train.batch_size={local_batch * data_ranks}",
            f"use {' or '.join(map(str, sizes))}",
        )
    if asked is None and micro_batch is None:
        return max((n for n in fitting if n <= 2 * pp), default=fitting[0])
    if asked is None:
        sizes = [local_batch // n for n in reversed(fitting)]
        if micro_batch not in sizes:
            raise UserError(
                f"does not cut the {local_batch} samples of a data rank into equal micro-batches, {kind}",
                f"train.micro_batch={micro_batch}",
                f"use {nearest(micro_batch or 0, sizes)}",
            )
        return local_batch // micro_batch
    if asked not in fitting:
        raise UserError(
            f"the {local_batch} samples of a data rank take a number that divides them, {kind}",
            f"parallel.microbatches={asked}",
            f"use {nearest(asked, fitting)}",
        )
    if micro_batch is not None and asked * micro_batch != local_batch:
        raise UserError(
            f"times train.micro_batch={micro_batch} is not the {local_batch} samples of a data rank",
            f"parallel.microbatches={asked}",
            "leave one of them out",
        )
    return asked


def nearest(value: int, choices: Sequence[int]) -> str:
    """The choices next below and above a value, such as "4 or 8".

    Args:
        value: what was asked for.
        choices: what would do, ascending; at least one.
    """
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))
