"""The table of C functions and the constants, compared with cuDNN's headers if they are installed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cupy_names import CONSTANTS, GONE
from ucudnn import cudnn
from ucudnn.backends.cudnn.api.declarations import DECLARATIONS
from ucudnn.cudnn import constants

C_LETTERS = {"float": "f", "double": "d", "size_t": "z", "int64_t": "l", "unsigned long long": "u"}


@pytest.fixture(scope="module")
def headers():
    """Return the text of cuDNN's headers without comments, or skip."""
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    folders = [Path(folder) / "include" for folder in spec.submodule_search_locations] if spec else []
    texts = [file.read_text() for folder in folders for file in sorted(folder.glob("cudnn_*.h"))]
    if not texts:
        pytest.skip("the headers of cuDNN are not installed: they come with the nvidia-cudnn wheels")
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", "\n".join(texts), flags=re.DOTALL)


def letter(parameter):
    """Return the letter of a C parameter; all pointers and descriptors are p."""
    if "*" in parameter or "[" in parameter or re.search(r"cudnn\w*(Handle|Descriptor)_t|cudaStream_t", parameter):
        return "p"
    words = re.sub(r"\bconst\b", "", parameter).split()
    return C_LETTERS.get(" ".join(words[:-1]), "i")


def test_declared_arguments_are_those_of_the_header(headers):
    for name, letters in DECLARATIONS.items():
        found = re.search(rf"\b{name}\(([^)]*)\)", headers)
        assert found, f"{name} is in no header"
        parameters = [each for each in " ".join(found[1].split()).split(",") if each.strip() not in ("", "void")]
        assert re.sub("[A-Z]", "p", letters) == "".join(map(letter, parameters)), name


def test_constants_have_the_values_of_the_headers(headers):
    headers = headers.replace("CUDNN_DEPRECATED_ENUM", "").replace("(1U << 0)", "1")
    values = {name: int(value) for name, value in re.findall(r"\b(CUDNN_\w+)\s*=\s*(\d+)\b", headers)}
    values |= {name: int(value) for name, value in re.findall(r"#define (CUDNN_\w+) +(\d+)\b", headers)}
    aliases = dict(re.findall(r"\b(CUDNN_\w+)\s*=\s*(CUDNN_\w+)", headers))
    values |= {name: values[target] for name, target in aliases.items() if target in values}
    assert sorted(CONSTANTS - set(values)) == sorted(GONE)
    ours = {name: value for name, value in vars(constants).items() if name in values}
    assert len(ours) > 180
    assert ours == {name: values[name] for name in ours}
    assert float(re.search(r"CUDNN_BN_MIN_EPSILON (\S+)", headers)[1]) == cudnn.CUDNN_BN_MIN_EPSILON
