"""The packages of the wheel, and its README; everything else about it is in pyproject.toml.

conf/ and sweep/ are at the top of the repository; in the wheel they are istar/conf/ and istar/conf/sweep/. The links of
the README are relative, and would lead nowhere on the page of the package index.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(r'(<img src="|!\[[^]]*\]\()(?!https?:)', r"\1https://REPOSITORY_URL/raw/HEAD/", readme)
readme = re.sub(r"(\]\()(?!https?:|#)", r"\1https://REPOSITORY_URL/blob/HEAD/", readme)

setup(
    packages=[*find_namespace_packages(include=["istar*", "hydra_plugins*"]), "istar.conf", "istar.conf.sweep"],
    package_dir={"istar.conf": "conf", "istar.conf.sweep": "sweep"},
    long_description=readme,
    long_description_content_type="text/markdown",
)
