"""Graph passes, one file each; `zc.passes.pipeline.PIPELINE` is their order."""
