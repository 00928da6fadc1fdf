"""Huawei Cloud's ModelArts, or an emulator of it."""
