"""torchvision's v2 transforms as a pipeline: ``Pipeline.from_torchvision(v2.Compose([...]))``.

The host draws for all transforms of the ``Compose``, in their order and from one generator of the sample's own, before
there is a picture (see ``torchvision_draws``); so the targets (boxes, masks, labels) are finished on the host. Each
transform becomes a stage that calls its own ``transform`` on the picture, with what was drawn: on CPU tensors in
workers, on CUDA tensors on the device lane. Where the first transform is a crop, no more than the crop is decoded.

What draws or looks at pixels as it goes (``CPU_ONLY``, functions and modules of one's own) is called as it is, on the
CPU, and with it all transforms that stand before it; its draws continue those of the transforms before. Behind one
whose result is not known beforehand (a lambda, a container), the rest is run on the CPU, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from minato_gpu.pipeline.pipeline import Field, Pipeline, Stage, TorchFunction
from minato_gpu.pipeline.stages import Fields, Params, names_in
from minato_gpu.samples import Value
from minato_gpu.util.messages import from_extra

from . import image_stages
from .photograph_stages import READ, decode
from .torchvision_classes import (
    ANY_DEVIATION,
    BOTH_LANES,
    KEEPING,
    NOTHING_TO_DO,
    RESIZING,
    STEEP,
    TO_SIZE,
    class_name,
    on_cpu_only,
    transforms_of,
)
from .torchvision_draws import OwnDraws, called, recorded, recorders_of, size_behind

with from_extra("torchvision"):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

_OURS = ("box", "drawn", "encoded", "generator", "image", "path", "progressive", "size")


@dataclass(frozen=True)
class _Plan:
    """How a ``Compose`` is taken apart.

    ``first``: drawn for before there is a picture. ``middle``: called on the CPU, after ``first``. ``last``: drawn for
    after ``middle``. Stages are made of ``first`` where there is no ``middle``, else of ``last``.
    """

    first: tuple[Any, ...]
    middle: tuple[Any, ...]
    last: tuple[Any, ...]
    targets: tuple[str, ...]

    @property
    def stages(self) -> tuple[Any, ...]:
        return self.last if self.middle else self.first


def build(
    transform: Any,
    *,
    picture: Field | None = None,
    targets: Sequence[str] = (),
    others: Mapping[str, Field] | None = None,
    name: str = "torchvision",
) -> Pipeline:
    """The pipeline of a v2 transform or ``Compose``; ``Pipeline.from_torchvision`` is this.

    Args:
        transform: called with the picture, a ``tv_tensors.Image`` of uint8, red, green, blue, and with the targets.
        picture: None where the data set returns "path", the name of a JPEG, PNG or WebP file. Else it returns "image",
            the picture itself (a Pillow image, an array (height, width, channels) or a tensor (channels, height,
            width)), and this says what the tensor is, such as ``Field(np.uint8, (3, None, None))``.
        targets: the fields that ``transform`` gets besides, in this order.
        others: the fields that are delivered as they are; ``{"label": Field(np.int64)}`` if not given.
        name: shown in messages.

    Outputs are "image", the targets and the others. Raises TypeError or ValueError for what cannot work.
    """
    targets = names_in("targets", targets)
    others = {"label": Field(np.int64)} if others is None else dict(others)
    if taken := sorted({*_OURS} & {*targets, *others}):
        raise ValueError(f"the pipeline itself has fields called {', '.join(taken)}: give yours other names")
    transforms = transforms_of(transform)
    plan = _plan(transforms, targets)
    image = picture or Field(np.uint8, (3, None, None))
    image = Field(image.dtype, image.shape, layout="CHW")
    fields = [image]
    for one in transforms:
        fields.append(_field_after(one, fields[-1]))
    stages = [*(_opening(plan) if picture is None else _opening_of_pictures(plan, image))]
    before = len(plan.first) + len(plan.middle) if plan.middle else 0
    if plan.middle:
        stages.append(_middle_stage(plan, fields[before]))
    for number, one in enumerate(plan.stages):
        if class_name(one) not in NOTHING_TO_DO:
            stages.append(_stage(one, number, fields[before + number + 1], {stage.name for stage in stages}))
    inputs = {"path": Field(object)} if picture is None else {"image": Field(object)}
    steep = any(class_name(one) in STEEP for one in transforms)
    return Pipeline(
        tuple(stages),
        outputs=("image", *targets, *others),
        name=name,
        inputs={**inputs, **dict.fromkeys(targets, Field(object)), **others},
        tolerance={"cpu": ANY_DEVIATION, "cuda": ANY_DEVIATION} if steep else {},
    )


# --- taking it apart -----------------------------------------------------------------------------------------------


def _plan(transforms: Sequence[Any], targets: tuple[str, ...]) -> _Plan:
    alone = [number for number, one in enumerate(transforms) if on_cpu_only(one)]
    first = alone[0] if alone else len(transforms)
    end = alone[-1] + 1 if alone else first
    if any(class_name(transforms[number]) not in {*BOTH_LANES, *KEEPING} for number in alone):
        end = len(transforms)
    return _Plan(tuple(transforms[:first]), tuple(transforms[first:end]), tuple(transforms[end:]), targets)


def _field_after(transform: Any, before: Field) -> Field:
    """Returns the field of a picture behind ``transform``; of dtype object where nobody knows."""
    name, dtype = class_name(transform), np.dtype(before.dtype)
    if dtype == np.dtype(object) or name not in {*BOTH_LANES, *KEEPING}:
        return Field(object)
    if name == "Normalize":
        if dtype.kind != "f":
            raise ValueError(
                f"v2.Normalize would get a picture of {dtype}: put v2.ToDtype(torch.float32, scale=True) before it"
            )
        return replace(before, level=before.level / max(transform.std))
    if name in ("ToDtype", "ConvertImageDtype"):
        return _converted(transform, before)
    channels, height, width = before.shape
    if name in ("Grayscale", "RGB"):
        channels = getattr(transform, "num_output_channels", 3)
    return replace(before, shape=(channels, *_size_after(transform, height, width)))


def _size_after(transform: Any, height: int | None, width: int | None) -> tuple[int | None, int | None]:
    name = class_name(transform)
    if name in TO_SIZE or (name == "Resize" and transform.size is not None and len(transform.size) == 2):
        return tuple(transform.size)
    if name in ("Resize", "Pad") and height is not None and width is not None:
        return size_behind(transform, {}, height, width)
    varies = name in RESIZING and (name != "RandomRotation" or transform.expand)
    return (None, None) if varies else (height, width)


def _converted(transform: Any, before: Field) -> Field:
    wanted = transform.dtype
    if isinstance(wanted, Mapping):
        if torch.Tensor in wanted:
            raise ValueError("v2.ToDtype: pictures are tv_tensors.Image here: name that in place of torch.Tensor")
        wanted = wanted.get(tv_tensors.Image, wanted.get("others"))
    if wanted is None:
        return before
    try:
        dtype = torch.empty(0, dtype=wanted).numpy().dtype
    except TypeError:
        raise ValueError(
            f"{wanted} has no counterpart in NumPy: convert pictures to torch.float16 or torch.float32 here, and "
            "batches in the training step"
        ) from None
    scales = getattr(transform, "scale", True) and (dtype.kind == "f") != (np.dtype(before.dtype).kind == "f")
    factor = (1 / 255 if dtype.kind == "f" else 255) if scales else 1
    return replace(before, dtype=dtype, level=before.level * factor)


# --- stages --------------------------------------------------------------------------------------------------------


def _opening(plan: _Plan) -> list[Stage]:
    """From "path" to a picture (3, height, width): no more of it than the first transform cuts out."""
    on_device = not plan.middle
    drawing = replace(
        _drawing(plan, "size"),
        features=image_stages.cost_features,
        feature_names=("encoded_bytes", "pixels", "crop_pixels", "bytes_to_crop_end", "progressive_bytes"),
    )
    planes = Stage(
        "to_image",
        reads=("image",),
        writes={"image": Field(np.uint8, (3, None, None), layout="CHW")},
        cpu=_planes,
        device=TorchFunction(_planes_on_device) if on_device else None,
    )
    return [READ, drawing, decode() if on_device else replace(decode(), device=None, tolerance={}), planes]


def _opening_of_pictures(plan: _Plan, image: Field) -> list[Stage]:
    return [
        Stage("picture", reads=("image",), writes={"image": Field(object)}, cpu=_picture),
        _drawing(plan, "image"),
        Stage("to_image", reads=("image", "box"), writes={"image": image}, cpu=_cut_picture),
    ]


def _drawing(plan: _Plan, sized: str) -> Stage:
    generator = {"generator": Field(np.uint8, (None,))} if plan.middle else {}
    targets = dict.fromkeys(plan.targets, Field(object))
    return Stage(
        "draw",
        reads=(sized, *plan.targets),
        writes={"drawn": Field(object), "box": Field(np.int32, (4,)), **targets, **generator},
        cpu=partial(_draw_all, plan=plan, recorders=recorders_of(plan.first, plan.targets)),
        draw=draw_seed,
    )


def _middle_stage(plan: _Plan, image: Field) -> Stage:
    return Stage(
        "transforms",
        reads=("image", "drawn", "generator", *plan.targets),
        writes={"image": image, "drawn": Field(object), **dict.fromkeys(plan.targets, Field(object))},
        cpu=partial(_call, plan=plan, recorders=recorders_of(plan.last, plan.targets), is_array=image.dtype != object),
    )


def _stage(transform: Any, number: int, image: Field, taken: set[str]) -> Stage:
    name = class_name(transform)
    return Stage(
        name if name not in taken else f"{name}_{number}",
        reads=("image", "drawn"),
        writes={"image": image},
        cpu=partial(_apply, transform=transform, number=number),
        device=TorchFunction(partial(_apply_on_device, transform=transform, number=number)),
        tolerance=dict.fromkeys(("cpu", "cuda"), BOTH_LANES[name]),
    )


def draw_seed(rng: np.random.Generator, meta: Fields) -> Params:
    """seed: of all that the sample's transforms draw. ``torch.manual_seed(seed)`` before the ``Compose`` is called
    gives the same sample."""
    return {"seed": rng.integers(1 << 63)}


def _planes(fields: Fields, params: Params) -> Fields:
    return {"image": fields["image"].transpose(2, 0, 1)}


def _planes_on_device(fields: Fields, params: Params) -> Fields:
    return {"image": fields["image"].permute(2, 0, 1)}


def _picture(fields: Fields, params: Params) -> Fields:
    image = fields["image"]
    return {"image": v2.functional.to_image(image) if isinstance(image, np.ndarray) else image}


def _cut_picture(fields: Fields, params: Params) -> Fields:
    crop = v2.functional.crop(fields["image"], *map(int, fields["box"]))
    return {"image": v2.functional.to_image(crop).numpy()}


def _apply(fields: Fields, params: Params, *, transform: Any, number: int) -> Fields:
    drawn = fields["drawn"][number]
    if drawn is None:
        return {"image": fields["image"]}
    return {"image": np.ascontiguousarray(transform.transform(_image_of(fields["image"]), drawn).numpy())}


def _apply_on_device(fields: Fields, params: Params, *, transform: Any, number: int) -> Fields:
    drawn = fields["drawn"][number]
    image = fields["image"]
    if drawn is not None:
        image = transform.transform(tv_tensors.Image(image), drawn).as_subclass(torch.Tensor)
    return {"image": image}


def _image_of(array: Value) -> Any:
    return tv_tensors.Image(torch.from_numpy(array if array.flags.writeable else array.copy()))


def _call(
    fields: Fields, params: Params, *, plan: _Plan, recorders: Sequence[Any], is_array: bool
) -> Mapping[str, Value]:
    """The transforms of ``first`` with what was drawn, and ``middle`` as they are; then the draws of ``last``."""
    image = _image_of(fields["image"].copy(order="K"))  # which a function of the user's may change in place
    for one, drawn in zip(plan.first, fields["drawn"], strict=True):
        image = image if drawn is None else one.transform(image, drawn)
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(fields["generator"].copy()))
    sample = (image, *(fields[name] for name in plan.targets))
    with OwnDraws(generator):
        for one in plan.middle:
            sample = called(one, sample)
        image, *targets = sample
        drawn, targets = recorded(recorders, image.shape, targets) if recorders else ((), targets)
    plain = tree_map(_plain, image)
    return {
        "image": plain.numpy() if is_array else plain,
        "drawn": drawn,
        **dict(zip(plan.targets, targets, strict=True)),
    }


def _plain(value: Value) -> Value:
    return value.as_subclass(torch.Tensor) if isinstance(value, tv_tensors.TVTensor) else value


def _draw_all(fields: Fields, params: Params, *, plan: _Plan, recorders: Sequence[Any]) -> Fields:
    """Returns what ``first`` draws, the targets behind it, and the box of the picture that is needed."""
    shape = (3, *map(int, fields["size"])) if "size" in fields else v2.functional.get_dimensions(fields["image"])
    generator = torch.Generator().manual_seed(int(params["seed"]))
    with OwnDraws(generator):
        drawn, targets = recorded(recorders, shape, [fields[name] for name in plan.targets])
    box, drawn = _cut_out(plan.first, drawn, shape)
    made = {"drawn": drawn, "box": np.array(box, np.int32), **dict(zip(plan.targets, targets, strict=True))}
    return {**made, "generator": generator.get_state().numpy()} if plan.middle else made


def _cut_out(
    transforms: Sequence[Any], drawn: tuple[Value, ...], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Value, ...]]:
    """The box (top, left, height, width) of the picture that the first transform needs, and the draws with it cut."""
    _, height, width = shape
    whole = (0, 0, height, width)
    first = next((n for n, one in enumerate(transforms) if class_name(one) not in NOTHING_TO_DO), -1)
    if first < 0 or class_name(transforms[first]) not in TO_SIZE or drawn[first].get("needs_pad"):
        return whole, drawn
    if class_name(transforms[first]) == "CenterCrop":  # finds nothing left to cut
        rows, columns = transforms[first].size
        fits = rows <= height and columns <= width
        return (round((height - rows) / 2), round((width - columns) / 2), rows, columns) if fits else whole, drawn
    params = drawn[first]
    box = params["top"], params["left"], params["height"], params["width"]
    return box, (*drawn[:first], {**params, "top": 0, "left": 0}, *drawn[first + 1 :])
