"""`zc.check`: whether a loop does on N ranks what it does on one device. A wing: nothing of zc imports it."""
