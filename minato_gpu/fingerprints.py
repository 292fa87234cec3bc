"""Whether an object is what it was: a digest of what it holds, good within one process.

It is made of the object's pickle, but functions are taken for what they do (their code, defaults and closures), not for
their names: one may be defined anew under the same name, or not be a module's; so are those under ``lru_cache``. What
an object reads elsewhere as it is called is not looked at: global names, other modules, classes.
"""

from __future__ import annotations

import functools
import io
import pickle
from hashlib import blake2b
from types import CodeType, FunctionType

from minato_gpu.samples import Value

_Cached = type(functools.cache(str))


class _Pickler(pickle.Pickler):
    """What it writes is not to be loaded."""

    def reducer_override(self, obj: Value) -> Value:
        if isinstance(obj, FunctionType):  # as a state: a function may be in its own closure
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return str, (obj.__qualname__,), (obj.__code__, obj.__defaults__, obj.__kwdefaults__, cells, obj.__dict__)
        if isinstance(obj, CodeType):
            names = obj.co_names, obj.co_varnames, obj.co_freevars
            taken = obj.co_flags, obj.co_argcount, obj.co_posonlyargcount, obj.co_kwonlyargcount
            return str, (obj.co_name,), (obj.co_code, obj.co_exceptiontable, obj.co_consts, *names, *taken)
        if isinstance(obj, _Cached):  # else pickled by its name
            return str, (), obj.__dict__  # with what it wraps
        return NotImplemented


def fingerprint(value: Value) -> bytes | None:
    """None where it cannot be told: such as what holds a lock or an open file."""
    found, file = blake2b(digest_size=16), io.BytesIO()

    def add(buffer: pickle.PickleBuffer) -> None:
        found.update(buffer.raw())

    try:
        _Pickler(file, 5, buffer_callback=add).dump(value)
    except Exception:  # runs the values' own code
        return None
    found.update(file.getbuffer())
    return found.digest()
