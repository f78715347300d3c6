"""Tests of the networks whose training steps ship: they have as many parameters as was published."""

import pytest

torch = pytest.importorskip("torch")

from bench.memory import compared_models, models  # noqa: E402


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # of torchvision's models and of GPT-2
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("vgg16_bn", 138_365_992),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("inception_v3", 27_161_264),
        ("densenet121", 7_978_856),
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
    ],
)
def test_networks_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = getattr(models, name, getattr(compared_models, name, None))()
    assert sum(each.numel() for each in model.parameters()) == parameters
