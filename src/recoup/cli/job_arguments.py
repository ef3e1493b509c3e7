"""The arguments of ``recoup job``, and the job that they say."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeVar

from recoup.errors import UsageError

if TYPE_CHECKING:
    from recoup.job.job import Job
    from recoup.job.layout import Kernels, Layout, Numbers
    from recoup.job.model import Model

__all__ = ["add_job_arguments", "degrees_given", "job_of", "model_of"]

_T = TypeVar("_T")
_DEGREES = ("tensor", "context", "pipeline", "expert", "zero", "schedule", "chunks", "sequence_parallel", "micro_batch")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, devices, layout, kernels and numbers."""
    model = parser.add_argument_group("model")
    model.add_argument("--config", metavar="FILE", help="config.json of Hugging Face's transformers")
    model.add_argument("--preset", metavar="NAME", help="a public model by name, such as gpt-175b or llama3-70b")
    model.add_argument(
        "--model", type=_pairs, default={}, metavar="FIELD=VALUE,...", help="sizes, such as layers=96,hidden=12288,heads=96,vocab=51200"
    )
    model.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME", help="field of --config that changes no size (repeatable)"
    )
    model.add_argument("--job", metavar="FILE", help="a whole job as JSON, instead of all these")
    where = parser.add_argument_group("devices")
    where.add_argument("--gpus", type=int, metavar="N", help="devices of the whole job")
    where.add_argument("--device", metavar="NAME|FILE", help="such as a100, h100, b200, mi300x, or a JSON file of a measured one")
    where.add_argument("--limit", metavar="BYTES", help="what a device may hold (default: its memory less a reserve)")
    where.add_argument("--price", type=float, metavar="DOLLARS", help="of one device for one hour")
    layout = parser.add_argument_group("layout (left out altogether, the fastest that fits is searched for)")
    for name, what in (("tensor", "tensor parallel degree"), ("context", "context parallel degree"), ("pipeline", "stages"),
                       ("chunks", "virtual stages of a device"), ("expert", "expert parallel degree"),
                       ("expert-tensor", "tensor parallel degree inside an expert"),
                       ("shard", "replicas over which states are sharded")):  # fmt: skip
        layout.add_argument(f"--{name}", type=int, metavar="N", help=what)
    layout.add_argument(
        "--group", type=int, metavar="N", help="micro-batches that a virtual stage sees before the next one (default: pipeline)"
    )
    layout.add_argument("--edge-layers", type=_edges, metavar="FIRST,LAST", help="layers of the first and of the last part of the pipeline")
    layout.add_argument("--sequence-parallel", action="store_const", const=True, help="split the rest along the sequence")
    layout.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"), help="of the pipeline (default: 1f1b)")
    layout.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="what is sharded over replicas; 3 is FSDP")
    layout.add_argument("--micro-batch", type=int, metavar="N", help="sequences that a device sees at once (default: 1)")
    layout.add_argument("--global-batch", type=int, metavar="N", help="sequences of a step (default: one for each device)")
    layout.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence (default: 4096)")
    kernels = parser.add_argument_group("kernels and numbers")
    kernels.add_argument("--precision", choices=("bf16", "fp8"), help="of products (default: bf16)")
    kernels.add_argument("--attention", choices=("flash", "explicit"), help="kernel of attention (default: flash)")
    kernels.add_argument("--offload", action="store_const", const=True, help="activations may wait in host memory")
    kernels.add_argument(
        "--kernels", type=_pairs, default={}, metavar="FIELD=VALUE,...", help="other kernels, such as loss=fused,overlap_tensor=true"
    )
    kernels.add_argument("--numbers", type=_pairs, default={}, metavar="FIELD=VALUE,...", help="bytes of states, such as optimizer_bytes=4")


def job_of(args: argparse.Namespace) -> Job:
    """The job that the arguments say.

    Raises:
        UsageError: something is missing, wrong or does not fit together; the message names the field.
    """
    from recoup.cost import device
    from recoup.job.file import load_job
    from recoup.job.job import Job

    if args.job:
        return load_job(args.job)
    found = device(_needed(args.device, "--device"))
    model, kernels, numbers = model_of(args), kernels_of(args), numbers_of(args)
    return Job(model, layout_of(args), found, kernels, numbers)


def degrees_given(args: argparse.Namespace) -> bool:
    """Whether any part of the layout was given."""
    return any(getattr(args, name) is not None for name in _DEGREES)


def model_of(args: argparse.Namespace) -> Model:
    """The model.

    Raises:
        UsageError: none or several are given, or a size is wrong.
    """
    import msgspec

    from recoup.job.file import changed
    from recoup.job.huggingface import read_config
    from recoup.job.model import Model
    from recoup.job.presets import preset

    if args.config and args.preset:
        raise UsageError("give --config or --preset, not both; --model changes single sizes of either")
    if args.config:
        return changed(read_config(args.config, args.ignore_field), args.model)
    if args.preset:
        return changed(preset(args.preset), args.model)
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in args.model]
    if missing:
        raise UsageError(f"no model: give --config, --preset, or --model with {', '.join(missing)}")
    unknown = [name for name in args.model if name not in Model.__struct_fields__]
    if unknown:
        raise UsageError(f"model field `{unknown[0]}` is not known; valid values: {', '.join(Model.__struct_fields__)}")
    try:
        least = msgspec.convert({name: args.model[name] for name in ("layers", "hidden", "heads", "vocab")}, type=Model, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(str(error.__cause__ or f"model field: {error}")) from error
    return changed(least, args.model)


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout; data parallelism takes what the other degrees leave of the devices.

    Raises:
        UsageError: the devices are not divided by the other degrees.
    """
    from recoup.job.file import changed
    from recoup.job.layout import Layout

    names = (
        "tensor",
        "context",
        "pipeline",
        "chunks",
        "expert",
        "expert_tensor",
        "shard",
        "sequence_parallel",
        "schedule",
        "zero",
        "micro_batch",
        "group",
        "edge_layers",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    gpus = _needed(args.gpus, "--gpus")
    inner = given.get("tensor", 1) * given.get("context", 1) * given.get("pipeline", 1)
    if gpus < 1 or inner < 1 or gpus % inner:
        raise UsageError(
            f"--gpus: {gpus} devices are not divided by tensor * context * pipeline = {inner}; take a multiple of {max(inner, 1)}"
        )
    batch = args.global_batch or gpus
    return changed(Layout(), given | {"data": gpus // inner, "global_batch": batch, "sequence": args.sequence or 4096})


def kernels_of(args: argparse.Namespace) -> Kernels:
    """The kernels.

    Raises:
        UsageError: a field is not known.
    """
    from recoup.job.file import changed
    from recoup.job.layout import Kernels

    given = {name: getattr(args, name) for name in ("attention", "offload") if getattr(args, name) is not None}
    return changed(Kernels(), given | args.kernels)


def numbers_of(args: argparse.Namespace) -> Numbers:
    """Bytes of states and precision.

    Raises:
        UsageError: a field is not known.
    """
    from recoup.job.file import changed
    from recoup.job.layout import Numbers

    given = {} if args.precision is None else {"precision": args.precision}
    if args.zero == 3 and "weight_bytes" not in args.numbers:
        # Sharded weights are those that the optimizer changes, in four bytes; copies in two are gathered.
        given |= {"weight_bytes": 4, "master_bytes": 0}
    return changed(Numbers(), given | args.numbers)


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form FIELD=VALUE")
        found[name.strip()] = value.strip()
    return found


def _edges(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIRST,LAST")
    return int(parts[0]), int(parts[1])


def _needed(value: _T | None, name: str) -> _T:
    if value is None:
        raise UsageError(f"{name} is missing")
    return value
