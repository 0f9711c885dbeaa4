"""Import every public name of the installed package, and run the first example of a page."""

import importlib
import pkgutil
import re
import sys
from importlib.metadata import requires, version
from pathlib import Path

import numpyro_scalegp

root = Path(numpyro_scalegp.__file__).parent
if not root.is_relative_to(sys.prefix):
    sys.exit(f"`numpyro_scalegp` must be the installed package, got {root}.")
if not (root / "py.typed").exists():
    sys.exit("The wheel has no `py.typed`.")

declared = [
    re.split(r"[<>=!~; ]", line)[0] for line in requires("numpyro_scalegp") if ";" not in line
]
print("  " + " ".join(f"{name}=={version(name)}" for name in sorted([*declared, "jaxlib"])))

num_names = 0
for info in pkgutil.walk_packages(numpyro_scalegp.__path__, "numpyro_scalegp."):
    if info.name.split(".")[1] in numpyro_scalegp._OF_EXTRAS:  # which are not installed here
        continue
    module = importlib.import_module(info.name)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
        num_names += 1
for name in numpyro_scalegp.__all__:
    getattr(numpyro_scalegp, name)
print(f"  {num_names + len(numpyro_scalegp.__all__)} public names")

example, _picture = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.M | re.S)
exec(compile(example, sys.argv[1], "exec"), {"__name__": "__main__"})
