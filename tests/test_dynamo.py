"""torch's compiler is imported when it is used, whole and once, and not by every optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import gc
import sys
import torch
import apps.experiment

layer = torch.nn.Linear(3, 3)

def step(optimizer):
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())

adam = torch.optim.Adam(layer.parameters())
step(adam)
step(torch.optim.SGD(layer.parameters(), momentum=0.9))
assert "torch._dynamo.config" not in sys.modules
"""


def run(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRAIN + text], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_neither_an_optimizer_nor_a_look_at_all_modules_imports_the_compiler():
    run(
        "import inspect\n"
        "inspect.getmodule(sys._getframe())\n"
        "import torch.distributed.tensor\n"  # looks as well, and must not meet itself half made
        "assert 'torch._dynamo.config' not in sys.modules\n"
    )


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config as used; import torch._dynamo.utils",
        "torch.compiler.reset(); used = torch._dynamo.config",
    ],
)
def test_whatever_else_is_used_is_the_real_one(use):
    run(
        f"{use}\n"
        "import torch._dynamo\n"
        "assert sys.modules['torch._dynamo'] is torch._dynamo\n"
        "assert torch._dynamo.__file__.endswith('__init__.py')\n"
        "assert sys.modules['torch._dynamo.config'] is torch._dynamo.config is used\n"
        "assert used.__spec__.origin.endswith('config.py')\n"
        "modules = [each for each in gc.get_objects() if isinstance(each, type(sys))]\n"
        "assert [each.__name__ for each in modules].count(used.__name__) == 1\n"
        "assert torch.compile(layer, backend='eager')(torch.ones(2, 3)).shape == (2, 3)\n"
        "assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1\n"
        "step(adam)\n"
    )


def test_what_a_model_keeps_from_the_compiler_is_kept_from_it():
    run(
        "@torch.compiler.disable\n"
        "def forward(x):\n"
        "    assert not torch.compiler.is_compiling()\n"
        "    return layer(x)\n"
        "assert forward._torchdynamo_disable\n"
        "torch.compile(lambda x: forward(x), backend='eager')(torch.ones(2, 3))\n"
    )


def test_a_compiled_step_stops_where_it_would_have_stopped():
    """What `disable` was called for before the compiler came is disabled after it came."""
    run(
        "from torch._dynamo.utils import counters\n"
        "compiled = torch.compile(lambda: layer(torch.ones(2, 3)), backend='eager')\n"
        "assert compiled().shape == (2, 3)\n"
        "assert counters['stats']['unique_graphs'] == 1\n"
        "step(torch.optim.Adam(layer.parameters()))\n"
        "disabled = torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable\n"
        "assert disabled._torchdynamo_disable\n"
    )
