"""Inference engines behind one protocol: `base.Engine`; SGLang (`sglang`) and a scripted one (`scripted`)."""
