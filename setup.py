"""Lists the packages: each folder below the four top ones that has an `__init__.py`. All else is in pyproject.toml."""

from setuptools import find_packages, setup

TOP_FOLDERS = ("plugin", "kernels", "adapters", "integration")

setup(
    packages=[
        f"pagedkv.{name}" for top in TOP_FOLDERS for name in (top, *(f"{top}.{sub}" for sub in find_packages(top)))
    ]
)
