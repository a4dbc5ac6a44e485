"""How many examples a property test of a kernel tries: a launch in the interpreter takes a tenth of a second."""

from hypothesis import HealthCheck, settings

few_examples = settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
