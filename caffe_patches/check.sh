#!/usr/bin/env bash
# Patches, builds, tests and times a checkout of Caffe, 1.0 or master: caffe_patches/check.sh CAFFE_CHECKOUT [OUT]
# Needs a GPU and what README.md beside this says; PYTHON names a Python with ucudnn[cuda13]. OUT gets what is measured.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
caffe=$(cd "$1" && pwd)
out=$(realpath -m "${2:-$here/../bench/results/caffe}")
python=$(command -v "${PYTHON:-python3}")

version=caffe-1.0
[ -e "$caffe/include/caffe/layers/cudnn_deconv_layer.hpp" ] && version=caffe-master
if ! grep -q UcudnnHandle_t "$caffe/include/caffe/layers/cudnn_conv_layer.hpp"; then
    (cd "$caffe" && git apply --unidiff-zero "$here/$version/handle.patch" "$here/caffe-1.0/port.patch")
fi
[ -e "$caffe/Makefile.config" ] || cp "$here/Makefile.config" "$caffe/"

build=.build_release
make -C "$caffe" -j"$(nproc)" PYTHON="$python" $build/tools/caffe.bin $build/test/test_convolution_layer.testbin
cd "$here/.." # from where Python finds the package bench
exec "$python" -m bench.caffe.compare --caffe "$caffe/$build/tools/caffe.bin" \
    --tests "$caffe/$build/test/test_convolution_layer.testbin" --out "$out"
