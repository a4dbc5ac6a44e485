"""Lets vLLM's CPU platform run on Ray, for tests: with this folder on PYTHONPATH, in every process.

vLLM asks its platform for the name of the Ray resource that stands for a device, and the CPU platform
has none. Here it is "GPU", of which a test's cluster claims to have some.
"""

import importlib.machinery
import sys

_PLATFORM = "vllm.platforms.cpu"


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module) -> None:
        super().exec_module(module)
        module.CpuPlatform.ray_device_key = "GPU"


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _PLATFORM:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
