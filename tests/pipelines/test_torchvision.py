"""torchvision's transforms as pipelines: on the CPU lane the samples of the user's own ``Compose``, bit for bit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils._pytree import tree_flatten

import minato_gpu
from minato_gpu import DataLoader, Field, Pipeline
from minato_gpu.lab.cli import main
from minato_gpu.lab.parity import check
from minato_gpu.samples import sample_seed
from pipelines import example_photographs
from pipelines.decoding import decode_whole
from tests.support.torchvision_operators import import_torchvision

torchvision = import_torchvision()
from torchvision import datasets, tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from pipelines.torchvision_classes import BOTH_LANES, CPU_ONLY, REFUSED  # noqa: E402

Sample = dict[str, Any]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PICTURE = Field(np.uint8, (3, None, None))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def negative(image: Any) -> Any:
    return image.bitwise_xor_(255)  # in place


class Own(v2.Transform):
    """A transform of the user's, which draws as it goes."""

    def transform(self, inpt: Any, params: Any) -> Any:
        return inpt // int(torch.randint(1, 4, ()))


FLOAT = (v2.ToDtype(torch.float32, scale=True),)
SQUARE = v2.Resize((64, 48))
# By class of v2, where one without arguments does not say all.
EXAMPLES: dict[str, Callable[[], list[Any]]] = {
    "AutoAugment": lambda: [v2.AutoAugment(), v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)],
    "CenterCrop": lambda: [v2.CenterCrop(100), v2.CenterCrop((400, 100)), v2.CenterCrop((100, 101))],
    "ColorJitter": lambda: [v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.ColorJitter(hue=0.5), v2.ColorJitter()],
    "Compose": lambda: [v2.Compose([v2.RandomResizedCrop(64), v2.Compose([v2.RandomCrop(32), *FLOAT])])],
    "ConvertBoundingBoxFormat": lambda: [v2.ConvertBoundingBoxFormat("CXCYWH")],
    "ConvertImageDtype": lambda: [v2.ConvertImageDtype(torch.float32), v2.ConvertImageDtype(torch.int16)],
    "ElasticTransform": lambda: [v2.Compose([SQUARE, v2.ElasticTransform(sigma=2.0)])],
    "FiveCrop": lambda: [v2.FiveCrop(64)],
    "GaussianBlur": lambda: [v2.GaussianBlur(5), v2.GaussianBlur((3, 7), (0.5, 3.0))],
    "GaussianNoise": lambda: [v2.GaussianNoise(), v2.Compose([*FLOAT, v2.GaussianNoise(), v2.RandomErasing(1.0)])],
    "Grayscale": lambda: [v2.Grayscale(), v2.Grayscale(3), v2.Compose([v2.Grayscale(), v2.RGB()])],
    "Lambda": lambda: [v2.Lambda(negative, tv_tensors.Image)],
    "LinearTransformation": lambda: [
        v2.Compose([v2.CenterCrop(4), *FLOAT, v2.LinearTransformation(torch.rand(48, 48), torch.rand(48))])
    ],
    "Normalize": lambda: [
        v2.Compose([*FLOAT, v2.Normalize(MEAN, STD)]),
        v2.Compose([v2.ToDtype(torch.float64), v2.Normalize([1.0], [3.0], inplace=True)]),
    ],
    "Pad": lambda: [v2.Pad(7), v2.Compose([SQUARE, v2.Pad((1, 2, 3, 4), padding_mode="reflect")])],
    "RandAugment": lambda: [v2.RandAugment(), v2.Compose([v2.RandomCrop(64), v2.RandAugment(3), *FLOAT])],
    "RandomAdjustSharpness": lambda: [v2.RandomAdjustSharpness(2.0)],
    "RandomAffine": lambda: [
        v2.RandomAffine(30, (0.1, 0.2), (0.5, 1.5), (-5, 5, -5, 5)),
        v2.RandomAffine(30, interpolation=v2.InterpolationMode.BILINEAR, fill=7),
    ],
    "RandomApply": lambda: [v2.RandomApply([v2.ColorJitter(0.5), v2.GaussianBlur(3)]), v2.RandomApply([Own()], 1.0)],
    "RandomChoice": lambda: [v2.RandomChoice([v2.RandomInvert(1.0), v2.Resize(40)], p=[0.3, 0.7])],
    "RandomCrop": lambda: [
        v2.RandomCrop(64),
        v2.RandomCrop((70, 30), padding=4),
        v2.RandomCrop((400, 500), pad_if_needed=True),
        v2.RandomCrop((150, 225)),
    ],
    "RandomErasing": lambda: [
        v2.RandomErasing(0.8),
        v2.Compose([v2.RandomResizedCrop(64), *FLOAT, v2.RandomErasing(0.8, value="random", inplace=True)]),
    ],
    "RandomGrayscale": lambda: [v2.RandomGrayscale(0.5)],
    "RandomOrder": lambda: [v2.RandomOrder([v2.RandomCrop(100), v2.RandomHorizontalFlip(), v2.RandomRotation(9)])],
    "RandomPerspective": lambda: [
        v2.RandomPerspective(),
        v2.RandomPerspective(interpolation=v2.InterpolationMode.NEAREST, fill=3),
    ],
    "RandomPosterize": lambda: [v2.RandomPosterize(3)],
    "RandomResize": lambda: [v2.Compose([v2.RandomResize(80, 120), v2.RandomCrop(64)])],
    "RandomResizedCrop": lambda: [
        v2.RandomResizedCrop(64),
        v2.RandomResizedCrop((40, 90), scale=(0.5, 1.0), interpolation=v2.InterpolationMode.BICUBIC, antialias=False),
        v2.RandomResizedCrop(64, interpolation=v2.InterpolationMode.NEAREST),
        v2.RandomResizedCrop(64, interpolation=v2.InterpolationMode.LANCZOS),
    ],
    "RandomRotation": lambda: [v2.RandomRotation(30), v2.Compose([v2.RandomRotation(90, expand=True), v2.Resize(50)])],
    "RandomShortestSize": lambda: [v2.Compose([v2.RandomShortestSize([90, 120], 150), v2.RandomErasing(1.0)])],
    "RandomSolarize": lambda: [v2.RandomSolarize(128)],
    "RandomZoomOut": lambda: [v2.Compose([v2.RandomZoomOut(side_range=(1.0, 2.0)), v2.RandomCrop(64)])],
    "Resize": lambda: [
        v2.Resize(50),
        v2.Resize((50, 60), interpolation=v2.InterpolationMode.BICUBIC),
        v2.Resize(None, max_size=77),
        v2.Compose([v2.CenterCrop((100, 50)), v2.Resize(30), v2.RandomCrop((60, 30))]),
    ],
    "SanitizeBoundingBoxes": lambda: [v2.Compose([v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes()])],
    "SanitizeKeyPoints": lambda: [v2.SanitizeKeyPoints(labels_getter=None)],
    "ScaleJitter": lambda: [v2.Compose([v2.ScaleJitter((120, 120), (0.5, 1.2)), v2.RandomErasing(1.0)])],
    "SetClampingMode": lambda: [v2.Compose([v2.SetClampingMode("soft"), v2.RandomCrop(64)])],
    "TenCrop": lambda: [v2.TenCrop(64)],
    "ToDtype": lambda: [
        v2.ToDtype(torch.float32, scale=True),
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
        v2.Compose([*FLOAT, v2.ToDtype(torch.uint8, scale=True)]),
    ],
    "ToImage": lambda: [v2.ToImage(), v2.Compose([v2.ToImage(), v2.RandomResizedCrop(64)])],
    "ToPILImage": lambda: [v2.Compose([v2.RandomCrop(64), v2.ToPILImage(), v2.ToImage()])],
    "ToPureTensor": lambda: [v2.Compose([v2.RandomCrop(64), v2.ToPureTensor(), v2.RandomHorizontalFlip(), *FLOAT])],
    "TrivialAugmentWide": lambda: [v2.TrivialAugmentWide(), v2.Compose([v2.TrivialAugmentWide(), v2.RandomCrop(9)])],
    "": lambda: [  # those of the user's own
        Own(),
        v2.Compose([v2.RandomResizedCrop(64), Own(), v2.RandomHorizontalFlip(), v2.RandomErasing(1.0)]),
        v2.Compose([v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(), v2.Resize(40), v2.GaussianNoise(), *FLOAT]),
        torch.nn.Sequential(v2.RandomCrop(64), v2.ColorJitter(0.3)),
    ],
}
# Words in what refuses boxes and masks, or warns of them.
WITHOUT_TARGETS = re.compile("FiveCrop|TenCrop|RandomErasing|ToPIL|Sequential|reflect|AugMix|Augment")


def examples(name: str) -> list[Any]:
    """Transforms of this class of v2."""
    return EXAMPLES[name]() if name in EXAMPLES else [getattr(v2, name)()]


NAMES = sorted({*EXAMPLES, *BOTH_LANES, *CPU_ONLY} - {"JPEG"})  # which needs torchvision's C++ extension
CASES = [(name, number) for name in NAMES for number in range(len(examples(name)))]


SIZE = (150, 225)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in workers: more would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cat() -> Image.Image:
    picture = example_photographs.photograph("chelsea.png")[:, :, ::-1]
    return Image.fromarray(np.ascontiguousarray(picture)).resize(SIZE[::-1])


def targets() -> Sample:
    return {
        "boxes": tv_tensors.BoundingBoxes([[20, 30, 110, 115], [50, 5, 200, 140]], format="XYXY", canvas_size=SIZE),
        "labels": torch.tensor([4, 5]),
        "points": tv_tensors.KeyPoints([[10, 20], [150, 100]], canvas_size=SIZE),
        "mask": tv_tensors.Mask(torch.arange(2 * SIZE[0] * SIZE[1]).reshape(2, *SIZE) % 7),
    }


def seed_of(pipeline: Pipeline, seed: int) -> int:
    """What the sample's transforms draw with."""
    number = next(n for n, stage in enumerate(pipeline.stages) if stage.draw is not None)
    return int(pipeline.draw(number, {}, seed)["seed"])


def called(transform: Any, seed: int, *sample: Any) -> Any:
    """What the user's own transform returns with these draws."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        return transform(*sample)
    finally:
        torch.set_rng_state(state)


def assert_same(got: Any, wanted: Any) -> None:
    (values, shape), (expected, form) = tree_flatten(got), tree_flatten(wanted)
    assert shape == form
    for value, other in zip(values, expected, strict=True):
        if isinstance(other, torch.Tensor):
            other = other.as_subclass(torch.Tensor)
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value.as_subclass(torch.Tensor)
            assert value.dtype == other.dtype
            assert torch.equal(value, other)
        else:
            assert value == other


class TestClasses:
    def test_each_has_its_place_in_one_list_and_in_the_manual(self) -> None:
        kinds = {name for name, kind in vars(v2).items() if inspect.isclass(kind) and issubclass(kind, v2.Transform)}
        lists = [set(BOTH_LANES), set(CPU_ONLY), set(REFUSED)]
        assert set.union(*lists) == kinds - {"Transform"}
        assert sum(map(len, lists)) == len(kinds) - 1
        manual = (Path(minato_gpu.__file__).parent / "manual" / "torchvision.md").read_text(encoding="utf-8")
        for what, names in zip(("both lanes", "CPU only", "refused"), lists, strict=True):
            (row,) = re.findall(rf"^\| {what} \|.*$", manual, re.MULTILINE)
            assert set(re.findall(r"`(\w+)`", row)) == names, what

    @pytest.mark.parametrize(("name", "number"), CASES)
    def test_is_bit_equal_on_the_cpu(self, cat: Image.Image, name: str, number: int) -> None:
        transform = examples(name)[number]
        together = not WITHOUT_TARGETS.search(repr(transform))
        pipeline = Pipeline.from_torchvision(
            transform, picture=PICTURE, targets=("target",) if together else (), others={}
        )
        for seed in range(3):
            fields = {"image": cat, **({"target": targets()} if together else {})}
            before = torch.get_rng_state()
            made = pipeline.run(fields, seed)
            assert torch.equal(before, torch.get_rng_state()), "it has drawn from the generator of all"
            sample = (v2.functional.to_image(cat), *([targets()] if together else []))
            wanted = called(transform, seed_of(pipeline, seed), *sample)
            assert_same(tuple(made.values()), wanted if together else (wanted,))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", sorted(BOTH_LANES))
    def test_means_the_same_on_the_device_lane(self, cat: Image.Image, name: str, device: str) -> None:
        for transform in examples(name):
            together = not WITHOUT_TARGETS.search(repr(transform))
            names = ("target",) if together else ()
            pipeline = Pipeline.from_torchvision(transform, picture=PICTURE, targets=names, others={})
            if all(stage.device is None for stage in pipeline.stages):
                continue
            samples = [{"image": cat, **({"target": targets()} if together else {})}]
            rows = check(pipeline, samples, device=device, draws=3)
            assert all(row.passed for row in rows), rows

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_is_refused_with_what_to_do(self, name: str) -> None:
        kind = getattr(v2, name)
        with pytest.warns(UserWarning, match="deprecated") if name == "ToTensor" else nullcontext():
            transform = {"UniformTemporalSubsample": lambda: kind(3), "ToTensor": kind}.get(name, lambda: kind())()
        with pytest.raises(ValueError, match=f"v2.{name} cannot .*(collate_fn|its place|videos)"):
            Pipeline.from_torchvision(v2.Compose([v2.RandomHorizontalFlip(), transform]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of photographs."""
    root = tmp_path_factory.mktemp("pictures")
    picture = example_photographs.photograph("chelsea.png")
    for number in range(6):
        path = root / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(example_photographs.jpeg(picture[: 150 + 20 * number, number:220]))
    return root


USUAL = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(32),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)


def decoded(path: str) -> Any:
    return tv_tensors.Image(torch.from_numpy(decode_whole(np.fromfile(path, np.uint8))).permute(2, 0, 1))


def opened(path: str) -> Any:
    with Image.open(path) as picture:
        return picture.convert("RGB")


def plus_ten(target: int) -> int:
    return target + 10


class Boxes(torch.utils.data.Dataset[Any]):
    """A detection data set of the user's own, whose ``transforms`` gets the target too."""

    def __init__(self, folder: Path, transforms: Any) -> None:
        self.paths = sorted(map(str, folder.glob("*/*.jpg")))
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = opened(self.paths[index])
        boxes = tv_tensors.BoundingBoxes([[5, 5, 100, 100]], format="XYXY", canvas_size=image.size[::-1])
        target = {"boxes": boxes, "labels": torch.tensor([index])}
        return (image, target) if self.transforms is None else self.transforms(image, target)


def a_list(samples: list[Any]) -> list[Any]:
    return samples


class TestDataSets:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_are_the_users_own(self, folder: Path, workers: int) -> None:
        given = datasets.ImageFolder(folder, transform=USUAL, target_transform=plus_ten)
        data, pipeline = minato_gpu.from_torchvision(given)
        loader = DataLoader(data, batch_size=3, num_workers=workers, pipeline=pipeline)
        torch.manual_seed(5)
        base = int(torch.empty((), dtype=torch.int64).random_().item())  # what PyTorch's loader draws
        torch.manual_seed(5)
        made = list(loader)
        images = torch.cat([batch["image"] for batch in made])
        assert torch.cat([batch["target"] for batch in made]).tolist() == [t + 10 for t in given.targets]
        for index, (path, _) in enumerate(given.samples):
            seed = seed_of(pipeline, sample_seed(base, 0, index))
            assert_same(images[index], called(USUAL, seed, decoded(path)))
        assert given.transform is USUAL

    def test_files_of_other_kinds_are_left_to_the_data_set(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        opened(str(next(folder.glob("*/*.jpg")))).save(tmp_path / "a" / "0.bmp")
        data, pipeline = minato_gpu.from_torchvision(datasets.ImageFolder(tmp_path, transform=USUAL))
        assert pipeline.run(data[0], 0)["image"].shape == (3, 32, 32)

    def test_a_part_of_one(self, folder: Path) -> None:
        part = torch.utils.data.Subset(datasets.ImageFolder(folder, transform=USUAL), [4, 1])
        data, pipeline = minato_gpu.from_torchvision(part)
        assert [pipeline.run(data[n], 0)["target"] for n in range(len(data))] == [1, 0]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_targets_travel_along(self, folder: Path, workers: int) -> None:
        together = v2.Compose([v2.ToImage(), v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes(), v2.RandomHorizontalFlip()])
        given = Boxes(folder, together)
        data, pipeline = minato_gpu.from_torchvision(given)
        loader = DataLoader(data, batch_size=2, num_workers=workers, pipeline=pipeline, collate_fn=a_list)
        samples = [sample for batch in loader for sample in batch]
        for index, sample in enumerate(samples):
            assert isinstance(sample["target"]["boxes"], tv_tensors.BoundingBoxes)
            assert sample["target"]["labels"].tolist() == [index][: len(sample["target"]["labels"])]
            assert sample["target"]["boxes"].canvas_size == sample["image"].shape[1:]
        assert given.transforms is together

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (lambda folder: datasets.ImageFolder(folder), "has no transform: give it one"),
            (
                lambda folder: datasets.FakeData(3, transform=torchvision.transforms.CenterCrop(9)),
                "first version",
            ),
            (lambda folder: [1, 2], "has no transform"),
        ],
    )
    def test_what_cannot_work_says_what_to_do(self, folder: Path, given: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            minato_gpu.from_torchvision(given(folder))

    def test_a_sample_that_is_no_picture_is_refused(self) -> None:
        class Texts(list[Any]):
            transform = USUAL

        for texts in (Texts(["a"]), Texts([("a", 1, 2)])):
            with pytest.raises(TypeError, match="must return a picture"):
                minato_gpu.from_torchvision(texts)


class TestErrors:
    @pytest.mark.parametrize(
        ("transform", "message"),
        [
            (lambda: 3, "must be callable"),
            (lambda: v2.RandomCrop, "must be callable"),
            (lambda: v2.Compose([torchvision.transforms.ToTensor()]), "v2.ToImage"),
            (lambda: torchvision.transforms.Compose([v2.RandomCrop(3)]), "first version"),
            (lambda: v2.Normalize(MEAN, STD), "put v2.ToDtype"),
            (lambda: v2.ToDtype(torch.bfloat16), "no counterpart in NumPy"),
            (lambda: v2.ToDtype({torch.Tensor: torch.float32}), "tv_tensors.Image"),
            (lambda: v2.Resize(30, interpolation="box"), "Pillow"),
        ],
    )
    def test_at_construction(self, transform: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            Pipeline.from_torchvision(transform())

    @pytest.mark.parametrize("options", [{"targets": ["image"]}, {"others": {"drawn": Field(object)}}])
    def test_of_fields_that_are_taken(self, options: Any) -> None:
        with pytest.raises(ValueError, match="give yours other names"):
            Pipeline.from_torchvision(USUAL, **options)


class TestLanes:
    def test_each_transform_is_a_stage_of_both_lanes(self) -> None:
        pipeline = Pipeline.from_torchvision(USUAL)
        names = [stage.name for stage in pipeline.stages if stage.device is not None]
        assert names[2:] == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "ToDtype", "Normalize"]
        image = pipeline.fields_at(len(pipeline.stages))["image"]
        assert (image.dtype, image.shape) == (np.float32, (3, 32, 32))
        assert image.level == pytest.approx(1 / 255 / max(STD))

    def test_nothing_is_behind_an_unknown_one(self) -> None:
        pipeline = Pipeline.from_torchvision(v2.Compose([v2.RandomResizedCrop(32), Own(), *FLOAT]))
        assert all(stage.device is None for stage in pipeline.stages)


class TestCommand:
    def test_checks_a_transform_on_a_folder_of_pictures(self, folder: Path) -> None:
        pytest.importorskip("nvidia.dali")
        found = CliRunner().invoke(main, ["check", f"{__file__}:USUAL", "--data", str(folder)])
        assert found.exit_code == 0, found.output
        assert "every stage is within its tolerance" in found.output

    @pytest.mark.parametrize(
        ("name", "message"), [("USUAL", "name a folder"), ("MEAN", "has no transform"), ("NOTHING", "nothing called")]
    )
    def test_says_what_is_missing(self, name: str, message: str) -> None:
        found = CliRunner().invoke(main, ["check", f"{__file__}:{name}"])
        assert found.exit_code != 0
        assert message in found.output
