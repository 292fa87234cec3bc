"""Pipeline definition modules, one per workload.

A module that the commands can use by name (``minato-gpu check pipelines.image_classification``) has three
module-level functions:

- ``pipeline()`` returns the ``minato_gpu.Pipeline`` with its default settings;
- ``dataset(directory)`` returns a map-style data set over the files there, whose items are the pipeline's input
  fields (a "path" among them, where there is one, is shown in errors);
- ``example_data(directory)`` writes a small data set that ``dataset`` can open, without downloading anything.

Importing such a module must not import DALI, CuPy or CUDA: device implementations get those as arguments.
"""
