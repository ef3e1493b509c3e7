"""How fast are many layouts planned? Layouts of the 175-billion-parameter model, in one process, with its peak memory.

python -m benchmarks.job_sweep --layouts 10000
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence

from recoup.cost import device
from recoup.errors import UsageError
from recoup.job.layout import Kernels, Layout, Numbers, check_layout
from recoup.job.model import Model
from recoup.job.presets import preset
from recoup.job.sweep import layouts, sweep

__all__ = ["main"]

_DEVICES = (512, 1024, 768, 1536, 384)


def valid(model: Model, most: int) -> Iterator[Layout]:
    """Layouts that split the model evenly, over several numbers of devices."""
    found = 0
    for count in _DEVICES:
        for layout in layouts(model, Layout(sequence=2048, global_batch=3072), count, device("a100-80g")):
            try:
                check_layout(model, layout)
            except UsageError:
                continue
            yield layout
            found += 1
            if found == most:
                return


def main(argv: Sequence[str] | None = None) -> None:
    """Times one sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=10000)
    parser.add_argument("--preset", default="gpt-175b")
    options = parser.parse_args(argv)
    model = preset(options.preset)
    candidates = list(valid(model, options.layouts))
    started, cpu = time.perf_counter(), time.process_time()
    found, refused = sweep(model, candidates, device("a100-80g"), Kernels(), Numbers())
    seconds, busy = time.perf_counter() - started, time.process_time() - cpu
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    fitting = sum(item.fits for item in found)
    print(f"{len(found)} layouts of {options.preset} planned, {fitting} fit, {refused} refused")
    print(f"{seconds:.1f} s, {busy:.1f} s of CPU, {len(found) / seconds * 60:,.0f} layouts a minute, peak {peak:.0f} MiB")
    best = found[0]
    print(f"fastest: {best.layout.devices} devices, {best.layout.in_words}: {best.tokens_per_second:,.0f} tokens/s, MFU {best.mfu:.1%}")


if __name__ == "__main__":
    main()
