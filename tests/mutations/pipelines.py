"""Faults in what a cache keeps of the four pipelines, in what helps to write one's own, and in torchvision's."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== pipeline/undeclared_writes.py: test_pipeline.py
a size in which samples differ is suggested as fixed
-size.pop() if len(size) == 1 else None for
+size.pop() for

=== pipelines/image_stages.py: pipelines/test_photographs.py
a box in the middle lies in the corner
-{"box": np.array([(height - h) // 2, (width - w) // 2, h, w], np.int32)}
+{"box": np.array([0, 0, h, w], np.int32)}

=== pipelines/decoding.py: pipelines/test_decoding.py
boxes are cut from a picture of which scans are missing
-        if data[:2] == b"\xff\xd8" and not has_all_scans(data):
-            return encoded

a single column at the edge is decoded alone
-if min(height, width) < _NARROW else
+if min(height, width) < 1 else

=== pipelines/jpeg_scans.py: pipelines/test_headers.py
a scan that brings the upper bits of coefficients is taken for all of them
-= bits & 0x0F
+= 0

=== pipelines/volume_stages.py: pipelines/test_kept_fields.py
a kept volume loses its type
-np.asarray(label)}
+np.asarray(label, np.float32)}

=== pipelines/speech_recognition.py: pipelines/test_kept_fields.py
the only speed is drawn
-    only = speeds[0] if len(speeds) == 1 else None
+    only = None

=== pipelines/torchvision_compose.py: pipelines/test_torchvision.py
a crop is cut once more out of what was decoded
-{**params, "top": 0, "left": 0}
+params

a transform that is called as it is draws what those before it have drawn
-generator.set_state(torch.from_numpy(fields["generator"].copy()))
+generator.manual_seed(int(fields["generator"][0]))

=== pipelines/torchvision_draws.py: pipelines/test_torchvision.py
torchvision draws from the generator of all threads
-if func.__name__ in _DRAWING and
+if func.__name__ not in _DRAWING and

what is drawn behind a transform that resizes is for the size before it
-return _stand_in((channels, height, width)).as_subclass(type(value))
+return value
""")
