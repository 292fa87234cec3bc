"""Faults in what a cache keeps of the four pipelines, in what helps to write one's own, and in torchvision's."""

from __future__ import annotations

from tests.mutations.fault import Fault

_KEPT = ("pipelines/test_kept_fields.py",)
_TORCHVISION = ("pipelines/test_torchvision.py",)

FAULTS = (
    Fault(
        "a size in which samples differ is suggested as fixed",
        "pipeline/pipeline.py",
        "size.pop() if len(size) == 1 else None for",
        "size.pop() for",
        ("test_pipeline.py",),
    ),
    Fault(
        "a box in the middle lies in the corner",
        "pipelines/image_stages.py",
        "np.array([(height - h) // 2, (width - w) // 2, h, w], np.int32)}\n\n\ndef cost",
        "np.array([0, 0, h, w], np.int32)}\n\n\ndef cost",
        ("pipelines/test_photographs.py",),
    ),
    Fault(
        "boxes are cut from a picture of which scans are missing",
        "pipelines/decoding.py",
        '        if data[:2] == b"\\xff\\xd8" and not has_all_scans(data):\n            return encoded\n',
        "",
        ("pipelines/test_decoding.py",),
    ),
    Fault(
        "a single column at the edge is decoded alone",
        "pipelines/decoding.py",
        "if min(height, width) < _NARROW else",
        "if min(height, width) < 1 else",
        ("pipelines/test_decoding.py",),
    ),
    Fault(
        "a scan that brings the upper bits of coefficients is taken for all of them",
        "pipelines/jpeg_scans.py",
        "= bits & 0x0F",
        "= 0",
        ("pipelines/test_headers.py",),
    ),
    Fault(
        "a kept volume loses its type",
        "pipelines/volume_stages.py",
        "np.asarray(label)}",
        "np.asarray(label, np.float32)}",
        _KEPT,
    ),
    Fault(
        "the only speed is drawn",
        "pipelines/speech_recognition.py",
        "    only = speeds[0] if len(speeds) == 1 else None",
        "    only = None",
        _KEPT,
    ),
    Fault(
        "a crop is cut once more out of what was decoded",
        "pipelines/torchvision_compose.py",
        '{**params, "top": 0, "left": 0}',
        "params",
        _TORCHVISION,
    ),
    Fault(
        "torchvision draws from the generator of all threads",
        "pipelines/torchvision_draws.py",
        "if func.__name__ in _DRAWING and",
        "if func.__name__ not in _DRAWING and",
        _TORCHVISION,
    ),
    Fault(
        "what is drawn behind a transform that resizes is for the size before it",
        "pipelines/torchvision_draws.py",
        "return _stand_in((channels, height, width)).as_subclass(type(value))",
        "return value",
        _TORCHVISION,
    ),
    Fault(
        "a transform that is called as it is draws what those before it have drawn",
        "pipelines/torchvision_compose.py",
        'generator.set_state(torch.from_numpy(fields["generator"].copy()))',
        'generator.manual_seed(int(fields["generator"][0]))',
        _TORCHVISION,
    ),
)
