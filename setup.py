"""The packages of the wheel; everything else about it stands in pyproject.toml.

conf/ and, by the link in it, sweep/ lie at the top of the repository; in the wheel they are istar/conf/.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["istar*", "hydra_plugins*"]), "istar.conf"],
    package_dir={"istar.conf": "conf"},
)
