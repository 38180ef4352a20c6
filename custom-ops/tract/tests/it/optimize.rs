//! Models rewritten by `optimize` give the same results as in tract alone, for different values of their symbols.

use crate::support::{numbers, tensor};
use moh_operators::tolerance::TRACT_LAYER_F32;
use tract_onnx::prelude::*;
use tract_onnx::tract_core::floats::FloatPrecisionTranslator;
use tract_onnx::tract_core::ops::cast::cast;
use tract_onnx::tract_core::ops::cnn::{Conv, KernelFormat, PaddingSpec, PoolSpec};
use tract_onnx::tract_core::ops::einsum::EinSum;
use tract_onnx::tract_core::ops::math::{abs, add, mul, tanh};
use tract_onnx::tract_core::ops::nn::gelu_exact::gelu_exact;
use tract_onnx::tract_core::ops::nn::{DataFormat, Reduce, Reducer, Softmax, SoftmaxKind};
use tract_onnx::tract_core::transform::ModelTransform as _;
use tract_onnx::tract_hir::internal::*;

/// A model with input "x", whose first axis is symbolic.
fn model(shape: &[usize], build: impl Fn(&mut TypedModel, OutletId) -> OutletId) -> TypedModel {
    let mut model = TypedModel::default();
    let batch = model.symbols.sym("batch").to_dim();
    let dims: TVec<TDim> = std::iter::once(batch).chain(shape.iter().map(|n| n.to_dim())).collect();
    let x = model.add_source("x", f32::fact(dims)).unwrap();
    let output = build(&mut model, x);
    model.select_output_outlets(&[output]).unwrap();
    model
}

fn constant(model: &mut TypedModel, name: &str, shape: &[usize]) -> OutletId {
    let count = shape.iter().product();
    let rounded: Vec<f32> = numbers(count, count as u32).iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    model.add_const(name, tensor(shape, &rounded)).unwrap()
}

/// Runs the model with and without our rewrites on numbers in -1..1, compares, and returns the names of our operators.
fn check(shape: &[usize], model: &TypedModel) -> Vec<String> {
    check_up_to(1.0, shape, model)
}

/// As `check`, with numbers in `-largest..largest`.
fn check_up_to(largest: f32, shape: &[usize], model: &TypedModel) -> Vec<String> {
    let ours = moh_tract::optimize(model.clone()).unwrap();
    let names = ours.nodes().iter().map(|node| node.op.name().into_owned());
    let names = names.filter(|name| ["Linear", "Depthwise"].contains(&name.as_str())).collect();
    let options = RunOptions { executor: Some(moh_tract::executor(2).unwrap()), ..RunOptions::default() };
    let ours = ours.into_runnable_with_options(&options).unwrap();
    let tracts = model.clone().into_optimized().unwrap().into_runnable().unwrap();
    for batch in [1usize, 3, 1, 70] {
        let shape: Vec<usize> = std::iter::once(batch).chain(shape.iter().copied()).collect();
        let x: Vec<f32> = numbers(shape.iter().product(), 9).iter().map(|x| largest * x).collect();
        let x = tensor(&shape, &x).into_tvalue();
        let [found, expected] = [&ours, &tracts].map(|plan| plan.run(tvec!(x.clone())).unwrap().remove(0));
        assert_eq!(found.shape(), expected.shape());
        let [found, expected] = [&found, &expected].map(|t| t.try_as_plain_ram().unwrap().as_slice::<f32>().unwrap());
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() <= TRACT_LAYER_F32,
                "batch {batch}, element {i}: {expected}, found {found}"
            );
        }
    }
    names
}

fn product(axes: &str, weight: &[usize], bias: Option<&[usize]>, x: &[usize]) -> TypedModel {
    model(x, |model, x| {
        let weight = constant(model, "weight", weight);
        let op = EinSum::new(axes.parse().unwrap(), f32::datum_type());
        let mut output = model.wire_node("product", op, &[x, weight]).unwrap()[0];
        if let Some(bias) = bias {
            let bias = constant(model, "bias", bias);
            output = model.wire_node("sum", add(), &[output, bias]).unwrap()[0];
        }
        output
    })
}

#[test]
fn products_with_constants_use_our_kernels() {
    for (axes, weight, bias, x) in [
        ("amk,kn->amn", [37, 600], None, vec![5, 37]),
        ("amk,kn->amn", [600, 37], Some([1, 1, 37]), vec![5, 600]),
        ("amk,nk->amn", [19, 64], Some([1, 1, 19]), vec![1, 64]),
    ] {
        let model = product(axes, &weight, bias.as_ref().map(|bias| &bias[..]), &x);
        assert_eq!(check(&x, &model), ["Linear"], "{axes} {weight:?}");
    }
    let model = product("mk,nk->mn", &[8, 16], None, &[16]);
    assert_eq!(check(&[16], &model), ["Linear"]);
}

#[test]
fn unsupported_products_and_biases_are_not_rewritten() {
    // A product over an axis that is not the last one; then a sum whose constant is not a row.
    let model = product("akm,kn->amn", &[6, 7], None, &[6, 5]);
    assert!(check(&[6, 5], &model).is_empty());
    let model = product("amk,kn->amn", &[6, 5], Some(&[1, 5, 1]), &[5, 6]);
    assert_eq!(check(&[5, 6], &model), ["Linear"]);
}

#[test]
fn product_that_is_also_a_model_output_keeps_its_sum() {
    let mut model = product("amk,kn->amn", &[6, 5], Some(&[1, 1, 5]), &[4, 6]);
    let product = model.node_by_name("product").unwrap().id;
    let sum = model.node_by_name("sum").unwrap().id;
    model.select_output_outlets(&[product.into(), sum.into()]).unwrap();
    assert_eq!(check(&[4, 6], &model), ["Linear"]);
}

#[test]
fn sums_with_two_constants_after_a_product() {
    let model = model(&[5, 6], |model, x| {
        let weight = constant(model, "weight", &[6, 4]);
        let op = EinSum::new("amk,kn->amn".parse().unwrap(), f32::datum_type());
        let mut y = model.wire_node("product", op, &[x, weight]).unwrap()[0];
        for name in ["first", "second"] {
            let number = constant(model, name, &[1, 1, 4]);
            y = model.wire_node(format!("{name}.sum"), add(), &[y, number]).unwrap()[0];
        }
        y
    });
    assert_eq!(check(&[5, 6], &model), ["Linear"]);
}

#[test]
fn depthwise_convolutions_use_our_kernels() {
    for (format, x, dilations) in [
        (DataFormat::NHWC, [9, 7, 20], None),
        (DataFormat::NHWC, [9, 7, 20], Some(tvec![2, 3])),
        (DataFormat::NCHW, [20, 9, 7], None),
    ] {
        let model = model(&x, |model, x| {
            let kernel = constant(model, "kernel", &[20, 1, 3, 3]);
            let bias = constant(model, "bias", &[20]);
            let pool_spec = PoolSpec {
                data_format: format,
                kernel_shape: tvec![3, 3],
                padding: PaddingSpec::Explicit(tvec![1, 0], tvec![1, 2]),
                dilations: dilations.clone(),
                strides: Some(tvec![1, 2]),
                input_channels: 20,
                output_channels: 20,
            };
            let conv = Conv { pool_spec, kernel_fmt: KernelFormat::OIHW, group: 20, q_params: None };
            model.wire_node("conv", conv, &[x, kernel, bias]).unwrap()[0]
        });
        let expected: &[&str] = if format == DataFormat::NHWC { &["Depthwise"] } else { &[] };
        assert_eq!(check(&x, &model), expected);
    }
}

#[test]
fn image_smaller_than_a_depthwise_kernel_is_refused() {
    let mut model = TypedModel::default();
    let [batch, height, width] = ["batch", "height", "width"].map(|name| model.symbols.sym(name).to_dim());
    let x = model.add_source("x", f32::fact([batch, height, width, 4.to_dim()])).unwrap();
    let (kernel, bias) = (constant(&mut model, "kernel", &[4, 1, 5, 5]), constant(&mut model, "bias", &[4]));
    let pool_spec = PoolSpec {
        data_format: DataFormat::NHWC,
        kernel_shape: tvec![5, 5],
        padding: PaddingSpec::Explicit(tvec![1, 1], tvec![1, 1]),
        dilations: None,
        strides: Some(tvec![1, 1 << 20]),
        input_channels: 4,
        output_channels: 4,
    };
    let conv = Conv { pool_spec, kernel_fmt: KernelFormat::OIHW, group: 4, q_params: None };
    let output = model.wire_node("conv", conv, &[x, kernel, bias]).unwrap();
    model.select_output_outlets(&output).unwrap();
    let plan = moh_tract::optimize(model).unwrap().into_runnable().unwrap();
    let run = |height: usize, width: usize| {
        plan.run(tvec![tensor(&[1, height, width, 4], &numbers(height * width * 4, 1)).into_tvalue()])
    };
    assert_eq!(run(3, 4).unwrap()[0].shape(), [1, 1, 1, 4]);
    for (height, width, expected) in [(2, 4, "height of at least 5, found 4"), (3, 1, "width of at least 5, found 3")] {
        let message = format!("{:#}", run(height, width).expect_err("the kernel reaches beyond the zero-padding"));
        assert!(message.contains(&format!("Depthwise: expected a zero-padded {expected}")), "{message}");
    }
}

#[test]
fn sums_and_products_broadcast() {
    for other in [vec![1, 1, 1], vec![1, 1, 6], vec![1, 5, 1], vec![1, 5, 6]] {
        for flipped in [false, true] {
            let model = model(&[5, 6], |model, x| {
                let other = constant(model, "other", &other);
                let pair = if flipped { [other, x] } else { [x, other] };
                let sum = model.wire_node("sum", add(), &pair).unwrap()[0];
                let product = model.wire_node("product", mul(), &[x, sum]).unwrap()[0];
                model.wire_node("square", mul(), &[product, sum]).unwrap()[0]
            });
            check(&[5, 6], &model);
        }
    }
    // Both operands are broadcast, and neither is constant.
    let model = model(&[1, 4, 1], |model, x| {
        let row = model.wire_node("row", AxisOp::Move(2, 3), &[x]).unwrap()[0];
        let other = constant(model, "other", &[1, 3, 1, 1]);
        let column = model.wire_node("column", mul(), &[x, other]).unwrap()[0];
        model.wire_node("outer", add(), &[row, column]).unwrap()[0]
    });
    check(&[1, 4, 1], &model);
}

fn softmax(axis: usize, shape: &[usize]) -> TypedModel {
    model(shape, |model, x| {
        let op = Softmax { axes: tvec!(axis), quant_output_dt: None, kind: SoftmaxKind::Softmax };
        model.wire_node("softmax", op, &[x]).unwrap()[0]
    })
}

#[test]
fn softmax_of_short_and_long_rows() {
    for length in [1usize, 3, 64, 65] {
        check(&[2, length], &softmax(2, &[2, length]));
    }
}

/// exp(200) overflows float32.
#[test]
fn softmax_of_large_numbers_does_not_overflow() {
    for length in [2usize, 3, 64] {
        check_up_to(200.0, &[2, length], &softmax(2, &[2, length]));
        check_up_to(1e30, &[2, length], &softmax(2, &[2, length]));
    }
}

#[test]
fn softmax_along_any_axis() {
    for axis in [1, 2] {
        check(&[5, 3, 4], &softmax(axis, &[5, 3, 4]));
    }
}

/// The packed forms of the two layouts differ and must not be exchanged.
#[test]
fn constant_used_in_both_layouts_is_packed_twice() {
    let model = model(&[4, 8], |model, x| {
        let weight = constant(model, "weight", &[8, 8]);
        let product = |model: &mut TypedModel, name: &str, axes: &str| {
            let op = EinSum::new(axes.parse().unwrap(), f32::datum_type());
            model.wire_node(name, op, &[x, weight]).unwrap()[0]
        };
        let in_out = product(model, "in_out", "amk,kn->amn");
        let out_in = product(model, "out_in", "amk,nk->amn");
        model.wire_node("sum", add(), &[in_out, out_in]).unwrap()[0]
    });
    assert_eq!(check(&[4, 8], &model), ["Linear", "Linear"]);
}

/// tract removes a pair of inverse axis moves if the operator between them permits it; a product over a moved axis
/// must not.
#[test]
fn product_between_axis_moves_equals_tract() {
    for (there, back) in [((1, 2), (1, 2)), ((2, 1), (2, 1)), ((1, 3), (3, 1)), ((2, 3), (3, 2)), ((1, 2), (2, 1))] {
        let shape = [6, 6, 6];
        let model = model(&shape, |model, x| {
            let weight = constant(model, "weight", &[6, 6]);
            let op = EinSum::new("abmk,kn->abmn".parse().unwrap(), f32::datum_type());
            let moved = model.wire_node("there", AxisOp::Move(there.0, there.1), &[x]).unwrap()[0];
            let product = model.wire_node("product", op, &[moved, weight]).unwrap()[0];
            model.wire_node("back", AxisOp::Move(back.0, back.1), &[product]).unwrap()[0]
        });
        assert_eq!(check(&shape, &model), ["Linear"], "{there:?} {back:?}");
    }
}

/// tract's own operators compute a float16 model in float32, with one rounding at its end, and its interface stays as it was.
#[test]
fn float16_is_computed_in_float32() {
    let exact = model(&[6, 5, 4], |model, x| {
        let kernel = constant(model, "kernel", &[8, 6, 3, 3]);
        let bias = constant(model, "bias", &[8]);
        let pool_spec = PoolSpec {
            data_format: DataFormat::NCHW,
            kernel_shape: tvec![3, 3],
            padding: PaddingSpec::Explicit(tvec![1, 1], tvec![1, 1]),
            dilations: None,
            strides: None,
            input_channels: 6,
            output_channels: 8,
        };
        let conv = Conv { pool_spec, kernel_fmt: KernelFormat::OIHW, group: 1, q_params: None };
        let mut y = model.wire_node("conv", conv, &[x, kernel, bias]).unwrap()[0];
        y = model.wire_node("gelu", gelu_exact(), &[y]).unwrap()[0];
        let squares = EinSum::new("abhw,abhx->abwx".parse().unwrap(), f32::datum_type());
        y = model.wire_node("squares", squares, &[y, y]).unwrap()[0];
        let softmax = Softmax { axes: tvec!(3), quant_output_dt: None, kind: SoftmaxKind::Softmax };
        let weights = model.wire_node("softmax", softmax, &[y]).unwrap()[0];
        y = model.wire_node("weighted", mul(), &[y, weights]).unwrap()[0];
        y = model.wire_node("sum", Reduce::new(tvec!(3), Reducer::Sum), &[y]).unwrap()[0];
        // Which tract computes without a product, in the type that it is told.
        let outer = EinSum::new("abwk,abxk->abwx".parse().unwrap(), f32::datum_type());
        y = model.wire_node("outer", outer, &[y, y]).unwrap()[0];
        model.wire_node("tanh", tanh(), &[y]).unwrap()[0]
    });
    let mut narrow = exact.clone();
    FloatPrecisionTranslator::new(f32::datum_type(), f16::datum_type()).transform(&mut narrow).unwrap();
    // As products of an ONNX file have it; the translation leaves it out.
    for node in &mut narrow.nodes {
        if let Some(product) = node.op_as_mut::<EinSum>() {
            product.operating_dt = f16::datum_type();
        }
    }
    let narrow = moh_tract::optimize(narrow).unwrap();
    let f16_fact = |outlet: OutletId| narrow.outlet_fact(outlet).unwrap().datum_type == f16::datum_type();
    assert!(f16_fact(narrow.input_outlets().unwrap()[0]) && f16_fact(narrow.output_outlets().unwrap()[0]));
    for node in narrow.nodes().iter().filter(|node| node.op.name() != "Cast") {
        assert!(!node.inputs.iter().any(|&input| f16_fact(input)), "{node} reads float16");
    }
    assert_eq!(narrow.nodes().iter().filter(|node| node.op.name() == "Cast").count(), 2, "one at each end");

    let [found, expected] = [narrow, exact.into_optimized().unwrap()].map(|model| model.into_runnable().unwrap());
    let x: Vec<f16> = numbers(2 * 6 * 5 * 4, 5).into_iter().map(f16::from_f32).collect();
    let x = tensor(&[2, 6, 5, 4], &x);
    let found = found.run(tvec!(x.clone().into_tvalue())).unwrap().remove(0);
    let expected = expected.run(tvec!(x.cast_to::<f32>().unwrap().into_owned().into_tvalue())).unwrap().remove(0);
    let (found, expected) = (found.try_as_plain_ram().unwrap(), expected.try_as_plain_ram().unwrap());
    let (found, expected) = (found.as_slice::<f16>().unwrap(), expected.as_slice::<f32>().unwrap());
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        // One rounding to 11 bits, of numbers up to 1.
        let error = (found.to_f32() - expected).abs();
        assert!(error <= TRACT_LAYER_F32 + 1.0 / 4096.0, "{expected}, found {found}");
    }
}

/// What a model rounds is rounded: casts are left out only around operators that this crate computes in float32.
#[test]
fn casts_of_the_model_itself_are_kept() {
    let casts = |around_abs: bool| {
        model(&[4], |model, x| {
            let mut y = model.wire_node("narrow", cast(f16::datum_type()), &[x]).unwrap()[0];
            if around_abs {
                y = model.wire_node("abs", abs(), &[y]).unwrap()[0];
            }
            model.wire_node("wide", cast(f32::datum_type()), &[y]).unwrap()[0]
        })
    };
    let x = [1.0001f32, 1e6, 1e-9, -3.3];
    let run = |model: TypedModel| {
        let plan = moh_tract::optimize(model).unwrap().into_runnable().unwrap();
        let output = plan.run(tvec![tensor(&[1, 4], &x).into_tvalue()]).unwrap().remove(0);
        output.try_as_plain_ram().unwrap().as_slice::<f32>().unwrap().to_vec()
    };
    assert_eq!(run(casts(false)), x.map(|x| f16::from_f32(x).to_f32()));
    // Between its own casts onnxruntime does not round either.
    assert_eq!(run(casts(true)), x.map(f32::abs));
}
