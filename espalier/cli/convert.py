"""``espalier export`` and ``espalier import``: weights between formats, in one process."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from espalier.cli.main import Debug, app, one_clear_message

Source = Annotated[Path, typer.Argument(metavar="FROM", help="A checkpoint, or weights.", show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="TO", help="What to write.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option(help="Of the weights, as bfloat16; their own if not given.", show_default=False)
]
Tree = Annotated[str | None, typer.Option(help="The nested dict that holds the weights.", show_default=False)]


@app.command()
def export(
    source: Source,
    out: Out,
    form: Annotated[str, typer.Option("--format", help="safetensors, torch or dcp.")] = "safetensors",
    dtype: Dtype = None,
    shard_gigabytes: Annotated[float, typer.Option(help="Largest file of safetensors, in 10^9 bytes.")] = 5.0,
    tree: Tree = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Copy its config.json and tokenizer too.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights for others: safetensors, torch.save, or torch's distributed checkpoint."""
    given: dict[str, Any] = {"shard_gigabytes": shard_gigabytes, "companions": like}
    _convert(source, out, form, dtype, tree, debug, **given)


@app.command("import")
def import_(source: Source, out: Out, dtype: Dtype = None, tree: Tree = None, debug: Debug = False) -> None:
    """Make a folder of Espalier's checkpoints of others' weights, for engine.load(..., model_only=True)."""
    _convert(source, out, "espalier", dtype, tree, debug)


def _convert(
    source: Path, out: Path, form: str, dtype: str | None, tree: str | None, debug: bool, **more: Any
) -> None:
    with one_clear_message(debug):
        import torch

        from espalier.checkpoint.exporting import export

        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise ValueError(f"--dtype {dtype}: expected a dtype of floats, as float32, bfloat16 or float16.")
        count = export(source, out, form, dtype=kind, tree=tree, **more)
        Console().print(f"{count} tensors written to {out}", highlight=False, markup=False, soft_wrap=True)
