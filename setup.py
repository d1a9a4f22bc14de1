"""The packages of the wheel; everything else about it stands in pyproject.toml.

conf/ and sweep/ are at the top of the repository; in the wheel they are istar/conf/ and istar/conf/sweep/.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["istar*", "hydra_plugins*"]), "istar.conf", "istar.conf.sweep"],
    package_dir={"istar.conf": "conf", "istar.conf.sweep": "sweep"},
)
