"""Real models: what `ucudnn time --torch` runs. PyTorch is loaded when it is asked for."""

import json

from ucudnn.backends.measurement import Effort
from ucudnn.errors import BackendUnavailableError
from ucudnn.networks.variants import Variant
from ucudnn.settings import Settings


def time_model(
    factory: str,
    shape: str,
    batch: int | None,
    variant: Variant,
    settings: Settings,
    effort: Effort,
    *,
    as_json: bool = False,
    as_csv: bool = False,
) -> str:
    """Run a PyTorch model forward and backward, and return what its convolutions got and take, as text.

    Args:
        factory: 'module:callable', which returns the model.
        shape: of one sample: '3x224x224'.
        batch: mini-batch size, or None.
        variant: type, math mode and layout.
        settings: how its convolutions are planned.
        effort: how much time goes into one measurement; its repeats are those of each plan, too.
        as_json: as one JSON object.
        as_csv: as CSV, one line for each kernel.

    Raises:
        BackendUnavailableError: if PyTorch is not installed, or has no GPU.
        InvalidNetworkError: if there is no such model, or it does not take such an input.
    """
    try:
        from ucudnn.torch.model_timing import Step, parse_shape, time_step
    except ImportError as error:
        raise BackendUnavailableError(
            f"PyTorch cannot be imported ({error}): `pip install 'ucudnn[torch]'` brings it"
        ) from error
    step = Step(factory=factory, shape=parse_shape(shape), batch=batch, variant=variant)
    summary = time_step(step, settings, effort=effort, repeats=effort.repeats)
    if as_json:
        return json.dumps(summary.to_dict(), indent=2)
    return summary.to_csv() if as_csv else str(summary)
