"""All that knows vLLM: API generations, the weight-transfer back ends we register, and the source's end of a transfer.

Importing this package, `rendezvous` and `transport` needs torch only; vLLM is imported by `gloo_engine`, `nccl`, `api` and
`plugin` when they are used.
"""
