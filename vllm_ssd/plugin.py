"""The entry point in `vllm.general_plugins`.

vLLM calls `register` in every process it starts, on every machine where this package is
installed, whether saguaro is asked for or not: it must be quick and must never raise.
"""

import logging


def register() -> None:
    """Teach vLLM the speculative method `saguaro`. May be called more than once."""
    try:
        from vllm_ssd.integration.engine_args import install

        install()
    except Exception as error:  # an exception here would end every start of vLLM on this machine
        logging.getLogger("vllm.saguaro").warning(
            "vllm-ssd could not register the speculative method 'saguaro' (%s: %s); vLLM works without it",
            type(error).__name__,
            error,
        )
