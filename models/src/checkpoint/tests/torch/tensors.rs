//! Tensors that lie about their place.

use super::*;

fn float_storage(n: i64) -> Vec<u8> {
    storage("FloatStorage", "0", n)
}

fn fault(tensor: Vec<u8>) -> TensorFault {
    let file = saved(dict(&[("a.weight", tensor)]), &[&bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]);
    match refused(&file, &["tensor \"a.weight\""]) {
        Error::TorchTensor { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

fn values(tensor: Vec<u8>) -> Vec<f32> {
    let (_folder, checkpoint) = opened(&saved(dict(&[("w", tensor)]), &[&bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]));
    checkpoint.get("w").unwrap().to_f32().unwrap()
}

#[test]
fn views() {
    let view = |offset, shape: &[i64], strides: &[i64]| values(tensor(float_storage(6), offset, shape, strides));
    assert_eq!(view(0, &[2, 3], &[3, 1]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(view(2, &[2, 2], &[2, 1]), [2.0, 3.0, 4.0, 5.0]);
    assert_eq!(view(0, &[3, 2], &[1, 3]), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(view(5, &[], &[]), [5.0]);
    assert_eq!(view(1, &[1, 3, 1], &[0, 2, i64::MAX]), [1.0, 3.0, 5.0]);
    assert_eq!(view(3, &[1, 3, 1], &[i64::MAX, 1, 77]), [3.0, 4.0, 5.0]);
    assert_eq!(view(1, &[2, 2, 2], &[0, 1, 0]), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
    assert_eq!(view(i64::MAX, &[0, i64::MAX, i64::MAX], &[1, 1, 1]), [0.0; 0]);
}

#[test]
fn beyond_the_storage() {
    let beyond = |offset, shape: &[i64], strides: &[i64], expected: usize| {
        let found = fault(tensor(float_storage(6), offset, shape, strides));
        assert_eq!(found, TensorFault::Beyond { key: "0".to_owned(), last: expected, elements: 6 });
    };
    beyond(0, &[7], &[1], 6);
    beyond(6, &[], &[], 6);
    beyond(1, &[2, 3], &[3, 1], 6);
    beyond(0, &[2], &[i64::MAX], i64::MAX as usize);
    beyond(i64::MAX, &[1], &[1], i64::MAX as usize);
}

#[test]
fn products_that_overflow() {
    for (offset, shape, strides) in [
        (0, &[i64::MAX, 3][..], &[0, 0][..]),
        (0, &[1 << 62], &[0]),
        (0, &[3], &[i64::MAX]),
        (i64::MAX, &[2, 3], &[i64::MAX, 1]),
        (0, &[1 << 31, 1 << 31, 4], &[0, 0, 0]),
    ] {
        let found = fault(tensor(float_storage(6), offset, shape, strides));
        assert!(matches!(found, TensorFault::Overflow { .. } | TensorFault::Beyond { .. }), "{shape:?}: {found}");
    }
}

#[test]
fn copies_that_are_too_large() {
    // Without strides of 0 no view can be larger than its storage.
    let found = fault(tensor(float_storage(6), 0, &[1 << 50], &[0]));
    assert!(matches!(found, TensorFault::Copy { bytes, .. } if bytes == 1 << 52), "{found}");
    let each = tensor(float_storage(6), 0, &[100], &[0]);
    let many: Vec<(String, Vec<u8>)> = (0..100).map(|i| (format!("w{i}"), each.clone())).collect();
    let pairs: Vec<(&str, Vec<u8>)> = many.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    let file = saved(dict(&pairs), &[&[0; 24]]);
    let error = refused(&file, &["are left of the file's length"]);
    assert!(matches!(error, Error::TorchTensor { fault: TensorFault::Copy { bytes: 400, .. }, .. }), "{error}");
}

#[test]
fn shapes_that_are_none() {
    let with = |offset: Vec<u8>, shape: Vec<u8>, strides: Vec<u8>| {
        call("torch._utils", "_rebuild_tensor_v2", &[float_storage(6), offset, shape, strides])
    };
    let (shape, strides) = (ints(&[2]), ints(&[1]));
    for tensor in [
        with(int(-1), shape.clone(), strides.clone()),
        with(int(0), ints(&[-2]), strides.clone()),
        with(int(0), shape.clone(), ints(&[-1])),
        with(int(0), shape.clone(), ints(&[1, 1])),
        with(int(0), tuple(&[text("2")]), strides.clone()),
        with(int(0), int(2), strides.clone()),
        with(int(0), ints(&[1; 65]), ints(&[1; 65])),
    ] {
        assert_eq!(fault(tensor), TensorFault::Layout);
    }
}

#[test]
fn storages_of_another_length() {
    for n in [0, 5, 7, -1, i64::MAX, i64::MIN] {
        let found = fault(tensor(float_storage(n), 0, &[1], &[1]));
        let expected = TensorFault::StorageLength { key: "0".to_owned(), elements: n, bytes: 4, found: 24 };
        assert_eq!(found, expected);
    }
    let missing = saved(dict(&[("w", tensor(storage("FloatStorage", "../0", 6), 0, &[1], &[1]))]), &[&[0; 24]]);
    let error = refused(&missing, &["no entry \"archive/data/../0\""]);
    assert!(matches!(error, Error::Archive { fault: ArchiveFault::Missing { .. }, .. }));
}

#[test]
fn what_no_model_asks_for_may_be_anything() {
    let broken = call("torch._utils", "_rebuild_tensor_v2", &[int(1)]);
    let opaque = tensor(call("x", "y", &[]), 0, &[1], &[1]);
    let elsewhere = tensor(storage("FloatStorage", "17", 6), 9, &[1], &[1]);
    let state = dict(&[("w", floats(2)), ("broken", broken), ("opaque", opaque), ("no", call("a", "b", &[]))]);
    let (_folder, checkpoint) =
        opened(&saved(dict(&[("model", state), ("opt", dict(&[("s", elsewhere)]))]), &[&[0; 8]]));
    let mut loader = Loader::new(&checkpoint);
    loader.weight("w", &[2]);
    loader.finish(|_| false).unwrap();
    let mut loader = Loader::new(&checkpoint);
    loader.weight("opaque", &[1]);
    loader.weight("no", &[1]);
    let error = loader.finish(|_| true).unwrap_err();
    assert_says(
        &error,
        &["2 unreadable", "\"opaque\": an object of torch._utils._rebuild_tensor_v2", "\"no\": an object of a.b"],
    );
}

/// PyTorch stores the negative of a tensor as that tensor and a mark.
#[test]
fn numbers_that_are_to_be_negated_are_not_read() {
    let marked = |marks: Vec<u8>| {
        let hooks = call("collections", "OrderedDict", &[]);
        let arguments = [float_storage(6), int(0), ints(&[2]), ints(&[1]), vec![0x89], hooks, marks];
        call("torch._utils", "_rebuild_tensor_v2", &arguments)
    };
    assert_eq!(values(marked(dict(&[]))), [0.0, 1.0]);
    assert_eq!(values(marked(vec![b'N'])), [0.0, 1.0]);
    let file = saved(dict(&[("v", floats(6)), ("w", marked(dict(&[("neg", vec![0x88])])))]), &[&[0; 24]]);
    let (_folder, checkpoint) = opened(&file);
    let mut loader = Loader::new(&checkpoint);
    loader.weight("w", &[2]);
    let error = loader.finish(|_| true).unwrap_err();
    assert_says(&error, &["1 unreadable", "\"w\": an object of torch._utils._rebuild_tensor_v2"]);
}

#[test]
fn every_element_type() {
    for (class, dtype) in [
        ("BoolStorage", WeightType::Bool),
        ("ByteStorage", WeightType::U8),
        ("CharStorage", WeightType::I8),
        ("ShortStorage", WeightType::I16),
        ("IntStorage", WeightType::I32),
        ("LongStorage", WeightType::I64),
        ("HalfStorage", WeightType::F16),
        ("BFloat16Storage", WeightType::BF16),
        ("FloatStorage", WeightType::F32),
        ("DoubleStorage", WeightType::F64),
    ] {
        let n = 3 * dtype.bytes();
        let (_folder, checkpoint) =
            opened(&saved(dict(&[("w", tensor(storage(class, "0", 3), 0, &[3], &[1]))]), &[&vec![0; n]]));
        assert_eq!(checkpoint.get("w").unwrap().dtype(), dtype);
    }
}
