"""`ucudnn time --torch`: runs a PyTorch model. PyTorch is loaded when a command asks for it."""

from typing import TYPE_CHECKING

from ucudnn.errors import BackendUnavailableError
from ucudnn.networks.variants import Variant
from ucudnn.profiles.measurement import Effort
from ucudnn.settings import Settings

if TYPE_CHECKING:
    from ucudnn.torch.summary import Summary


def time_model(
    factory: str, shape: str, batch: int | None, variant: Variant, settings: Settings, effort: Effort
) -> "Summary":
    """Run a PyTorch model forward and backward, and return its convolutions' plans and times.

    Args:
        factory: 'module:callable', which returns the model.
        shape: the shape of one sample, such as '3x224x224'.
        batch: mini-batch size, or None.
        variant: data type, math mode and layout.
        settings: how the convolutions are planned.
        effort: the time for one measurement; each plan is repeated as often as a measurement.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or has no GPU.
        InvalidNetworkError: if there is no such model, or it does not take such an input.
    """
    try:
        from ucudnn.torch.model_timing import ModelStep, parse_shape, time_step
    except ImportError as error:
        raise BackendUnavailableError(
            f"PyTorch cannot be imported ({error}): `pip install 'ucudnn[torch]'` brings it"
        ) from error
    step = ModelStep(factory=factory, shape=parse_shape(shape), batch=batch, variant=variant)
    return time_step(step, settings, effort=effort, repeats=effort.repeats)
