"""One interpreter of a turn: `python -m bench.child` measures some works, and prints what it found as JSON.

It runs in the original's interpreter too, which has neither our packages nor their dependencies: nothing here and no
module of cases imports either at its top.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from bench.case import Case, Scope, Work
from bench.cases import cases
from bench.metering import measure

Found = dict[str, dict[str, float]]


def agreed(number: int) -> int:
    """The number of the first process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return number
    import torch.distributed as dist

    numbers = [number]
    dist.broadcast_object_list(numbers)
    return numbers[0]


def averaged(found: Found) -> Found:
    """The mean over all processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return found
    import torch.distributed as dist

    everywhere: list[Found] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {
        side: {meter: sum(one[side][meter] for one in everywhere) / len(everywhere) for meter in read}
        for side, read in found.items()
    }


def measured(rows: Sequence[Case], sides: Sequence[str], folder: Path, kept: Path) -> Found:
    """What the meters of a work's rows read."""
    work: Work = rows[0].work
    folder.mkdir(exist_ok=True)
    calls = {kind: work.sides[kind](Scope(kind, folder, kept)) for kind in sides if kind in work.sides}
    if not calls:
        return {}
    return averaged(measure(calls, list(dict.fromkeys(row.meter for row in rows)), agreed, work.once, work.rounds))


def main() -> None:
    """Measure what `$BENCH_ORDER` names: sides, folders, and for each work the positions of its rows in the table."""
    order = json.loads(os.environ["BENCH_ORDER"])
    warnings.simplefilter("ignore")
    table, found = cases(), []
    for number, positions in enumerate(order["works"]):
        rows = [table[position] for position in positions]
        found.append(measured(rows, order["sides"], Path(order["folder"], str(number)), Path(order["kept"])))
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found), flush=True)
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            # Else the slower process may abort when the other closes its connections.
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
