"""Places of the packages; all else is in pyproject.toml.

The repository's folders vendor/ and kernels_cu/ are the packages ``sparse24_plans._vendor`` and
``sparse24_plans.kernels_cu``. In a checkout these are symbolic links, which a build doesn't follow: a
download may have lost them.
"""

from setuptools import find_namespace_packages, setup

LINKED = {"sparse24_plans._vendor": "vendor", "sparse24_plans.kernels_cu": "kernels_cu"}


def is_linked(package: str) -> bool:
    """Whether a package lies below one of the links."""
    return any(f"{package}.".startswith(f"{link}.") for link in LINKED)


packages = [
    package
    for package in find_namespace_packages(include=["sparse24_plans", "sparse24_plans.*"])
    if not is_linked(package)
]
for link, folder in LINKED.items():
    packages += [link, *(f"{link}.{name}" for name in find_namespace_packages(folder))]

setup(packages=packages, package_dir=LINKED)
