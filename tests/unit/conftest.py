"""Property tests here give the same verdict each time, however slow the machine."""

from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None)
settings.load_profile("unit")
