"""Graph passes, one file each; `zc.passes.pipeline` has their order."""
