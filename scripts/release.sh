#!/usr/bin/env bash
# Makes what would be released, and looks at it as those will who install it: docs/development.md, "A
# release". Nothing is uploaded. For people; needs a network:
#
#     scripts/release.sh
#
# PYTHON names the interpreter (the newest that tpudist supports, by default python3.13).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.13}
if ! "$python" -c "import ensurepip" 2>/dev/null; then
  echo "$0: $python does not run. Name an interpreter: PYTHON=/path/to/python3.13 $0" >&2
  exit 1
fi
unset PYTHONPATH PYTHONHOME # the package is to come from the wheel
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "== build, and what the package's page will show"
"$python" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install --quiet build twine
rm -rf dist
"$folder/tools/bin/python" -m build --outdir dist . # the wheel is made of the sdist
"$folder/tools/bin/python" -m twine check --strict dist/*

echo "== what is in them"
"$python" - <<'EOF'
import pathlib
import subprocess
import tarfile
import zipfile

(wheel,), (sdist,) = (list(pathlib.Path("dist").glob(x)) for x in ("*.whl", "*.tar.gz"))
tracked = subprocess.run(
    ["git", "ls-files"], capture_output=True, text=True, check=True
).stdout.splitlines()
package = {x for x in tracked if x.startswith("tpudist/")}
in_wheel = {x for x in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in x}
in_sdist = {x.partition("/")[2] for x in tarfile.open(sdist).getnames()}
problems = {
    "tracked, and not in the wheel": package - in_wheel,
    "in the wheel, and not tracked": in_wheel - package,
    "tracked, and not in the sdist": set(tracked) - in_sdist,
    "in the sdist, and not tracked": in_sdist - set(tracked) - {"PKG-INFO"},
}
print(f"{wheel.name}: {len(in_wheel)} files, {wheel.stat().st_size / 1e6:.1f} MB")
print(f"{sdist.name}: {len(in_sdist)} files, {sdist.stat().st_size / 1e6:.1f} MB")
found = {what: sorted(names) for what, names in problems.items() if names}
if found:
    raise SystemExit(f"Not what the repository has: {found}")
EOF

echo "== installed, as others install it"
"$python" -m venv "$folder/user"
"$folder/user/bin/python" -m pip install --quiet dist/*.whl
cp tests/child_programs/typed_program.py README.md "$folder"
(
  cd "$folder"
  "$folder/user/bin/tpudist" --version
  "$python" - <<'EOF'
import pathlib
import re

(example,) = re.findall(r"^```python\n(.*?)^```", pathlib.Path("README.md").read_text(), re.M | re.S)
pathlib.Path("readme_example.py").write_text(example)
EOF
  "$folder/user/bin/python" -W error readme_example.py
  "$folder/user/bin/python" typed_program.py
  "$folder/user/bin/python" -m pip install --quiet mypy "basedpyright==1.40.*"
  "$folder/user/bin/mypy" --strict typed_program.py
  "$folder/user/bin/basedpyright" --level error --pythonpath "$folder/user/bin/python" typed_program.py
)

if ! grep -q '^\[project.urls\]' pyproject.toml; then
  echo "== NOT READY TO UPLOAD: the project has no public address yet (docs/development.md, \"A release\", 4)"
fi
