"""All that knows Megatron-core: which parameters a rank holds, how they are gathered, what they are called in HF.

Nothing here imports megatron: models are `torch.nn.Module`s that carry Megatron's names, attributes and configuration,
and process groups are reached through the seam. So everything runs, and is tested, without Megatron installed.
"""
