"""What only a GPU shows: training at its speed, weights over its bus, and what a checkpoint stalls.

Where there is no GPU the same works run on the CPU in small sizes, so that they can be tried; the table leaves them
out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.case import Call, Case, Scope, Work
from bench.metering import paused

STEPS: Final = 200
TOKENS: Final = 8 * 1024

TRAINING: Final = (
    "Steps of GPT-2 with 124 million parameters in bf16 by autocast, 8 sequences of 1,024 tokens, with fused AdamW; "
    'tokens per second are 8,192,000 over the milliseconds of a step. "raw" is the loop in plain torch.'
)
FABRIC: Final = 'Beside Fabric: the column "original" is Lightning Fabric there.'
OVERHEAD: Final = (
    'Rounds of 200 steps of a model of two small layers; "raw" is the plain loop. The device is waited for at the end '
    "of a round only."
)
OFFLOADED: Final = (
    "A forward pass of a model of 2 GB whose weights are in memory of the host; "
    '"raw" copies the same bytes from pinned memory to the device, which is what the bus allows.'
)
FROM_DISK: Final = (
    'A forward pass of a model of 2 GB whose weights are in files in the page cache; "raw" reads the bytes of '
    "such files."
)
LOADING: Final = (
    'A model of 8 GB from a safetensors file into memory of the device, the file in the page cache; "raw" reads the '
    "bytes of the file, or loads it with the function of safetensors."
)
SNAPSHOT: Final = (
    "A step of GPT-2 with 124 million parameters and a checkpoint saved behind it, until the next step is done; "
    '"raw" are the two steps without. Writing the files is waited for outside of the measured time.'
)


class Sizes(NamedTuple):
    """How large everything is."""

    device: str
    layers: int
    width: int
    vocabulary: int
    sequence: int
    batch: int
    offloaded: int
    loaded: int
    side: int


@cache
def sizes() -> Sizes:
    """Those of a GPU, or those to try the works without one."""
    import torch

    if torch.cuda.is_available():
        return Sizes("cuda", 12, 768, 50257, 1024, 8, 2 * 10**9, 8 * 10**9, 4096)
    return Sizes("cpu", 2, 64, 128, 32, 2, 2**22, 2**22, 256)


# ---------------------------------------------------------------- training
def gpt2() -> Any:
    """GPT-2: blocks of causal attention and a layer of four times the width, and tied embeddings."""
    import torch
    from torch import nn

    size = sizes()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
            self.together, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
            self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.together(self.before(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            query, key, value = heads.unbind(0)
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(size.vocabulary, size.width)
            self.places = nn.Embedding(size.sequence, size.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(size.layers)))
            self.last = nn.LayerNorm(size.width)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            x = self.words(inputs) + self.places.weight[: inputs.shape[1]]
            logits = self.head(self.last(self.blocks(x)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    with torch.device(size.device):
        return Model()


def parts() -> tuple[Any, Any, Any]:
    """The model, its optimizer, and one batch on the device."""
    import torch

    size = sizes()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), device=size.device)
    return model, optimizer, tokens


def stepping(tokens: Any, backward: Callable[[Any], object], model: Any, optimizer: Any) -> Call:
    """A step of a prepared model."""

    def step() -> None:
        backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_training(scope: Scope) -> Call:
    """A step in plain torch."""
    import torch

    model, optimizer, tokens = parts()
    forward = torch.autocast(sizes().device, torch.bfloat16)(model)
    return stepping(tokens, lambda loss: loss.backward(), forward, optimizer)


def prepare(scope: Scope) -> tuple[Any, Call]:
    """An Accelerator, and a step with it."""
    accelerator = scope.library("accel_torch", "accelerate").Accelerator(
        mixed_precision="bf16", cpu=sizes().device == "cpu"
    )
    model, optimizer, tokens = parts()
    return accelerator, stepping(tokens, accelerator.backward, *accelerator.prepare(model, optimizer))


def prepared_training(scope: Scope) -> Call:
    """A step with an Accelerator."""
    return prepare(scope)[1]


def fabric_training(scope: Scope) -> Call:
    """A step with Fabric."""
    import importlib

    fabric = importlib.import_module("lightning.fabric").Fabric(
        accelerator=sizes().device, devices=1, precision="bf16-mixed"
    )
    model, optimizer, tokens = parts()
    return stepping(tokens, fabric.backward, *fabric.setup(model, optimizer))


# ---------------------------------------------------------------- overhead
def small_parts() -> tuple[Any, Any, Any]:
    """A small model, its optimizer, and one batch on the device."""
    import torch

    device = sizes().device
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(4, 8, device=device)


def plain_steps(scope: Scope) -> Call:
    """A round of the plain loop."""
    model, optimizer, inputs = small_parts()

    def steps() -> None:
        for _ in range(STEPS):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def prepared_steps(scope: Scope) -> Call:
    """A round of the loop with an Accelerator."""
    accelerator = scope.library("accel_torch", "accelerate").Accelerator(cpu=sizes().device == "cpu")
    model, optimizer, inputs = small_parts()
    model, optimizer = accelerator.prepare(model, optimizer)

    def steps() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                optimizer.zero_grad()

    return steps


# ---------------------------------------------------------------- weights
class Offloaded(NamedTuple):
    """A model that is offloaded: square layers with sides of `scale` times the usual one, and where they are kept."""

    scale: float = 1.0
    dtype: str = "float32"
    on_disk: bool = False

    @property
    def side(self) -> int:
        """The side of a layer."""
        return int(self.scale * sizes().side)


def blocks(size: int, device: str, side: int | None = None, dtype: str = "float32") -> Any:
    """A model of square layers with so many bytes."""
    import torch

    side = side or sizes().side
    kind: torch.dtype = getattr(torch, dtype)
    with torch.device(device):
        layers = (torch.nn.Linear(side, side, bias=False, dtype=kind) for _ in count())
        number = max(1, size // (kind.itemsize * side * side))
        return torch.nn.Sequential(*(next(layers) for _ in range(number))).eval()


def bus(offloaded: Offloaded, scope: Scope) -> Call:
    """Copies the bytes of the offloaded model from pinned memory to the device."""
    import torch

    size, side = sizes(), offloaded.side
    pins, dtype = size.device == "cuda", getattr(torch, offloaded.dtype)
    held = [torch.empty(side, side, dtype=dtype, pin_memory=pins) for _ in range(4)]
    number = len(blocks(size.offloaded, "meta", side, offloaded.dtype))

    def copy() -> None:
        for index in range(number):
            held[index % 4].to(size.device, non_blocking=True)

    return copy


def offloaded_forward(offloaded: Offloaded, scope: Scope) -> Call:
    """A forward pass of the offloaded model."""
    import torch

    size = sizes()
    model = blocks(size.offloaded, "cpu", offloaded.side, offloaded.dtype)
    library = scope.library("accel_bigmodel", "accelerate")
    if offloaded.on_disk:
        library.disk_offload(model, scope.folder / "offloaded", torch.device(size.device))
    else:
        library.cpu_offload(model, torch.device(size.device))
    inputs = torch.ones(4, offloaded.side, dtype=getattr(torch, offloaded.dtype), device=size.device)

    def forward() -> None:
        with torch.no_grad():
            model(inputs)

    return forward


def weights_file(scope: Scope) -> Path:
    """The file with the weights, written by whoever comes first."""
    import torch
    from safetensors.torch import save_file

    path = scope.kept / "gpu" / "model.safetensors"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        state = blocks(sizes().loaded, "meta").state_dict()
        save_file({name: torch.ones(tensor.shape) for name, tensor in state.items()}, path, {"format": "pt"})
    return path


def reads_of_offloaded(offloaded: Offloaded, scope: Scope) -> Call:
    """Reads the bytes of the offloaded model from files in the page cache into memory that is used again."""
    folder = scope.folder / "read"
    folder.mkdir()
    weights = blocks(sizes().offloaded, "cpu", offloaded.side, offloaded.dtype).state_dict()
    files = [folder / name for name in weights]
    for file, weight in zip(files, weights.values(), strict=True):
        file.write_bytes(weight.numpy().tobytes())
    buffer = bytearray(2**26)

    def read() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    return read


def load_file(scope: Scope) -> Call:
    """Loads the weights onto the device with the function of safetensors."""
    from safetensors.torch import load_file as load_weights

    path, size = weights_file(scope), sizes()
    return lambda: load_weights(path, device=f"{size.device}:0" if size.device == "cuda" else "cpu")


def raw_reads(scope: Scope) -> Call:
    """Reads the bytes of the file into memory that is used again."""
    path, buffer = weights_file(scope), bytearray(2**26)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def loading(scope: Scope) -> Call:
    """Loads the weights onto the device."""
    path, size = weights_file(scope), sizes()
    library = scope.library("accel_bigmodel", "accelerate")
    place: Any = 0 if size.device == "cuda" else "cpu"

    def load() -> None:
        with library.init_empty_weights():
            model = blocks(size.loaded, "cpu")
        library.load_checkpoint_and_dispatch(model, str(path.parent), {"": place})

    return load


# ---------------------------------------------------------------- checkpoints
def trained_alone(scope: Scope) -> Call:
    """Two steps without a checkpoint."""
    step = prepared_training(scope)

    def steps() -> None:
        step()
        step()

    return steps


def saved_behind(scope: Scope) -> Call:
    """Two steps, between which a checkpoint is begun."""
    accelerator, step = prepare(scope)
    numbers = count()

    def steps() -> None:
        folder = scope.folder / str(next(numbers))
        step()
        accelerator.save_state(str(folder), async_save=True)
        step()
        with paused():
            accelerator.wait_for_checkpoint()
            shutil.rmtree(folder)

    return steps


GPU: Final = partial(Case, "GPU", needs="cuda")
STEP, MODEL = "GPU ms per step of 8,192 tokens", "GPT-2 124M, bf16"

TRAINED: Final = Work(prepared_training, prepared_training, plain_training, alone=True)
BESIDE_FABRIC: Final = Work(prepared_training, fabric_training, alone=True)
SMALL_STEPS: Final = Work(prepared_steps, prepared_steps, plain_steps, alone=True)
LOADED: Final = Work(loading, loading, raw_reads, alone=True)
BESIDE_SAFETENSORS: Final = Work(loading, raw=load_file, alone=True)
SAVED: Final = Work(saved_behind, raw=trained_alone, alone=True)
ON_DISK: Final = Offloaded(on_disk=True)
READ: Final = Work(partial(offloaded_forward, ON_DISK), raw=partial(reads_of_offloaded, ON_DISK), alone=True)


def offloaded_forwards(name: str, offloaded: Offloaded) -> tuple[Case, Case]:
    """A forward pass with weights in memory of the host, beside the bus and beside the original."""
    side = partial(offloaded_forward, offloaded)
    work = Work(side, side, partial(bus, offloaded), alone=True)
    case = partial(GPU, f"offloaded forward of {name}", "GPU s", work=work, method=OFFLOADED)
    return case(figure="ours/raw", limit=1.3), case(figure="ours/peer", limit=1.0)


CASES: Final = (
    GPU(MODEL, STEP, "ours/raw", 1.02, TRAINED, TRAINING),
    GPU(MODEL, STEP, "ours/peer", 1.02, TRAINED, TRAINING),
    GPU(f"{MODEL}, beside Fabric", STEP, "ours/peer", 1.02, BESIDE_FABRIC, FABRIC),
    GPU("a small step", "GPU us per step", "ours - raw", 20.0, SMALL_STEPS, OVERHEAD, STEPS),
    *offloaded_forwards("2 GB", Offloaded()),
    *offloaded_forwards("2 GB in layers of 1 MiB", Offloaded(1 / 8)),
    *offloaded_forwards("2 GB in layers of 16 MiB", Offloaded(1 / 2)),
    *offloaded_forwards("2 GB in layers of 1 GiB", Offloaded(4)),
    *offloaded_forwards("2 GB in bf16", Offloaded(dtype="bfloat16")),
    GPU("forward of 2 GB offloaded to the disk", "GPU s", "ours/raw", 1.2, READ, FROM_DISK),
    GPU("8 GB of weights to the device, beside safetensors", "GPU s", "ours/raw", 1.2, BESIDE_SAFETENSORS, LOADING),
    GPU("8 GB of weights to the device", "GPU s", "ours/raw", 1.5, LOADED, LOADING),
    GPU("8 GB of weights to the device", "GPU s", "ours/peer", 1.0, LOADED, LOADING),
    GPU("a checkpoint behind a step", "GPU ms", "ours - raw", None, SAVED, SNAPSHOT),
)
