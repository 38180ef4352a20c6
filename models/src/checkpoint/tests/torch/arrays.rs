//! State dicts of numpy arrays: within a file of torch.save, and as pickles of their own.

use super::*;

/// What numpy writes with protocols 2 to 5, by `arrays.py`.
const ARRAYS: [&[u8]; 4] = [
    include_bytes!("arrays-2.pkl"),
    include_bytes!("arrays-3.pkl"),
    include_bytes!("arrays-4.pkl"),
    include_bytes!("arrays-5.pkl"),
];

fn zipped(pickle: &[u8]) -> Vec<u8> {
    let mut zip = Zip::default();
    zip.add("archive/data.pkl", pickle);
    zip.finish()
}

fn check(checkpoint: &Checkpoint) {
    use WeightType::*;
    let base: Vec<f32> = (0..6u8).map(f32::from).collect();
    let check = |name: &str, shape: &[usize], dtype: WeightType, values: &[f32]| {
        let weight = checkpoint.get(name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!((weight.shape(), weight.dtype()), (shape, dtype), "{name}");
        assert_eq!(weight.to_f32().unwrap(), values, "{name}");
        assert_eq!(weight.file(), checkpoint.path(), "{name}");
    };
    check("c", &[2, 3], F32, &base);
    check("fortran", &[2, 3], F32, &base);
    check("transposed", &[3, 2], F32, &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    check("strided", &[2, 3], F32, &[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    check("half", &[2, 3], F16, &base);
    check("double", &[2, 3], F64, &base);
    check("negative", &[3], F32, &[-1.5, 1e30, 0.0]);
    check("long", &[2], I64, &[-1.0, (1u64 << 40) as f32]);
    check("bool", &[2], Bool, &[1.0, 0.0]);
    check("scalar", &[], F32, &[2.5]);
    check("empty", &[0, 4], F32, &[]);
    let mut loader = Loader::new(checkpoint);
    for name in ["big", "objects", "complex", "number"] {
        loader.weight(name, &[2]);
    }
    let error = loader.finish(|_| true).unwrap_err();
    let parts = ["4 unreadable:", "\"big\": a numpy array of type \">f4\"", "type \"c8\"", "multiarray.scalar"];
    assert_says(&error, &parts);
    assert!(error.to_string().contains("\"objects\": a"), "{error}");
}

#[test]
fn arrays_in_files_of_torch_save_and_alone() {
    for (protocol, pickle) in (2..).zip(ARRAYS) {
        for file in [pickle.to_vec(), zipped(pickle)] {
            let (_folder, checkpoint) = opened(&file);
            assert_eq!(checkpoint.weights_key(), Some("model"));
            check(&checkpoint);
            // Bytes stay in the file, text is decoded.
            let weight = checkpoint.get("c").unwrap();
            let place = weight.offset() as usize;
            assert_eq!(place == 0, protocol == 2);
            assert!(place == 0 || file[place..place + 24] == bytes_of(weight));
        }
    }
    let old = String::from_utf8_lossy(ARRAYS[0]).contains("numpy._core");
    assert!(old, "numpy 2 names its modules so, numpy 1 numpy.core");
    let at = |haystack: &[u8]| haystack.windows(11).position(|part| part == b"numpy._core");
    let mut numpy1 = ARRAYS[0].to_vec();
    while let Some(at) = at(&numpy1) {
        numpy1.remove(at + 6);
    }
    check(&opened(&numpy1).1);
}

#[test]
fn files_of_every_name() {
    let folder = Folder::new();
    for name in ["weights.pkl", "weights.bin", "weights.ckpt", "weights.pth", "weights.pt"] {
        let path = folder.write(name, ARRAYS[2]);
        check(&Checkpoint::open(&path, None).unwrap());
        // Alone in its folder it is found.
        check(&folder.open().unwrap());
        std::fs::remove_file(path).unwrap();
    }
    // The more usual ending comes first.
    folder.write("arguments.pkl", b"");
    folder.write("last.ckpt", b"");
    folder.write("weights.pth", ARRAYS[2]);
    check(&folder.open().unwrap());
}

/// An array of floats of that shape, with that state in the place of its own.
fn array(shape: Vec<u8>, dtype: Vec<u8>, fortran: bool, data: Vec<u8>) -> Vec<u8> {
    let made = call("numpy.core.multiarray", "_reconstruct", &[global("numpy", "ndarray"), ints(&[0]), text("b")]);
    let state = tuple(&[int(1), shape, dtype, vec![if fortran { 0x88 } else { 0x89 }], data]);
    [made, state, b"b".to_vec()].concat()
}

fn f4() -> Vec<u8> {
    let none = || b"N".to_vec();
    let made = call("numpy", "dtype", &[text("f4"), vec![0x89], vec![0x88]]);
    [made, tuple(&[int(3), text("<"), none(), none()]), b"b".to_vec()].concat()
}

fn raw_bytes(length: u8) -> Vec<u8> {
    [&[b'C', length][..], &vec![0; usize::from(length)]].concat()
}

#[test]
fn arrays_of_another_length_than_their_shape() {
    for (shape, length) in [
        (&[2][..], 4),
        (&[2], 12),
        (&[], 0),
        (&[0, i64::MAX, i64::MAX], 4),
        (&[i64::MAX, i64::MAX, 0], 0),
        (&[1 << 62, 4], 0),
    ] {
        for fortran in [false, true] {
            let file = program(dict(&[("w", array(ints(shape), f4(), fortran, raw_bytes(length)))]));
            let error = refused(&file, &["tensor \"w\": a numpy array of shape"]);
            assert!(matches!(error, Error::TorchTensor { fault: TensorFault::ArrayLength { .. }, .. }), "{error}");
        }
    }
    for fortran in [false, true] {
        let file = program(dict(&[("w", array(ints(&[0, i64::MAX, i64::MAX]), f4(), fortran, raw_bytes(0)))]));
        assert_eq!(opened(&file).1.get("w").unwrap().to_f32().unwrap(), [0.0; 0]);
    }
    let file = program(dict(&[("w", array(ints(&[-1]), f4(), false, raw_bytes(4)))]));
    assert!(matches!(refused(&file, &[]), Error::TorchTensor { fault: TensorFault::Layout, .. }));
}

#[test]
fn arrays_that_are_none() {
    let latin1 = |text: Vec<u8>| call("_codecs", "encode", &[text, super::text("latin1")]);
    for (odd, why) in [
        (array(ints(&[1]), f4(), false, int(1)), "elements are not bytes"),
        (array(ints(&[1]), f4(), false, latin1(text("\u{1f600}"))), "elements are not bytes"),
        (array(ints(&[1]), int(4), false, raw_bytes(4)), "objects"),
        (array(ints(&[1]), call("numpy", "dtype", &[text("V4")]), false, raw_bytes(4)), "type \"V4\""),
    ] {
        let good = array(ints(&[1]), f4(), false, raw_bytes(4));
        let (_folder, checkpoint) = opened(&program(dict(&[("good", good), ("odd", odd)])));
        let mut loader = Loader::new(&checkpoint);
        loader.weight("good", &[1]);
        loader.weight("odd", &[1]);
        assert_says(&loader.finish(|_| false).unwrap_err(), &["1 unreadable:", why]);
    }
    // A tensor's elements would be in a zip file.
    let file = program(dict(&[("a", floats(1)), ("w", array(ints(&[1]), f4(), false, raw_bytes(4)))]));
    assert_eq!(names(&opened(&file).1), ["w"]);
}

/// The same text, decoded for each of many arrays, would take more memory than the file.
#[test]
fn copies_of_one_text() {
    let encoded = call("_codecs", "encode", &[text(&"a".repeat(400)), text("latin1")]);
    let mut value = [encoded, vec![b'q', 7, b'0', b'}']].concat();
    for i in 0..20 {
        let array = array(ints(&[100]), f4(), false, vec![b'h', 7]);
        value.extend([text(&format!("w{i}")), array, b"s".to_vec()].concat());
    }
    let error = refused(&program(value), &["are left of the file's length"]);
    assert!(matches!(error, Error::TorchTensor { fault: TensorFault::Copy { .. }, .. }), "{error}");
}

#[test]
fn every_truncation_and_every_byte() {
    let folder = Folder::new();
    for pickle in [ARRAYS[0], ARRAYS[3]] {
        for length in (1..pickle.len()).step_by(3) {
            let error = refused(&pickle[..length], &[]);
            assert!(matches!(error, Error::Pickle { .. }), "{length}: {error}");
        }
        for at in 0..pickle.len() {
            for wrong in [0xff, pickle[at] ^ 1].into_iter().skip(at % 2).step_by(2) {
                let mut file = pickle.to_vec();
                file[at] = wrong;
                let Ok(checkpoint) = Checkpoint::open(&folder.write("model.pth", &file), None) else { continue };
                for name in checkpoint.names() {
                    let weight = checkpoint.get(name).unwrap();
                    assert_eq!(bytes_of(weight).len(), weight.elements() * weight.dtype().bytes());
                    weight.to_f32().unwrap();
                }
            }
        }
    }
}

#[test]
fn pickles_without_arrays() {
    for value in [dict(&[]), dict(&[("a", int(1))]), int(1)] {
        let error =
            refused(&program(value), &["no state dict", "no key holds tensors", "save_file(model.state_dict()"]);
        assert!(matches!(error, Error::NoStateDict { .. }));
    }
    let error = refused(&program(call("models", "Net", &[])), &["an object of models.Net", "state_dict()"]);
    assert!(matches!(error, Error::NotAStateDict { .. }));
}
