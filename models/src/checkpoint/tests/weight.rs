//! Elements of every type, at every alignment.

use half::{bf16, f16};

use super::*;

/// Opens a file of one tensor.
fn open_one(dtype: &str, shape: &[usize], data: &[u8], padding: usize) -> (Folder, Weight) {
    let folder = Folder::new();
    let header = json!({ "w": { "dtype": dtype, "shape": shape, "data_offsets": [0, data.len()] } });
    let text = header.to_string() + &" ".repeat(padding);
    folder.write("model.safetensors", &raw(text.as_bytes(), data));
    let weight = folder.open().unwrap().get("w").unwrap().clone();
    (folder, weight)
}

fn check<const N: usize>(dtype: WeightType, elements: &[[u8; N]], expected: &[f32]) {
    let data = elements.concat();
    assert_eq!(dtype.bytes(), N);
    for padding in 0..8 {
        let (folder, weight) = open_one(dtype.name(), &[elements.len()], &data, padding);
        assert_eq!((weight.dtype(), weight.elements()), (dtype, elements.len()));
        assert_eq!(weight.to_f32().unwrap(), expected, "{dtype}");
        let mut part = vec![7.0];
        weight.read_f32(1..elements.len() - 1, &mut part).unwrap();
        assert_eq!(part[0], 7.0);
        assert_eq!(part[1..], expected[1..elements.len() - 1]);
        let file = std::fs::read(folder.path("model.safetensors")).unwrap();
        assert_eq!(weight.file(), folder.path("model.safetensors"));
        assert_eq!(file[weight.offset() as usize..], data);
        weight.check_finite().unwrap();
    }
}

#[test]
fn every_type_becomes_f32() {
    use WeightType::*;
    check(Bool, &[[0], [1], [1]], &[0.0, 1.0, 1.0]);
    check(U8, &[0u8, 7, 255].map(u8::to_le_bytes), &[0.0, 7.0, 255.0]);
    check(I8, &[-128i8, 7, 127].map(i8::to_le_bytes), &[-128.0, 7.0, 127.0]);
    check(U16, &[0u16, 258, 65535].map(u16::to_le_bytes), &[0.0, 258.0, 65535.0]);
    check(I16, &[-32768i16, 258, 32767].map(i16::to_le_bytes), &[-32768.0, 258.0, 32767.0]);
    check(U32, &[0u32, 65537, 1 << 31].map(u32::to_le_bytes), &[0.0, 65537.0, 2147483648.0]);
    check(I32, &[-5i32, 65537, 1 << 30].map(i32::to_le_bytes), &[-5.0, 65537.0, 1073741824.0]);
    check(U64, &[0u64, 3, 1 << 63].map(u64::to_le_bytes), &[0.0, 3.0, 9223372036854775808.0]);
    check(I64, &[-9i64, 3, 1 << 62].map(i64::to_le_bytes), &[-9.0, 3.0, 4611686018427387904.0]);
    check(F64, &[-0.5f64, 0.1, 1e300].map(f64::to_le_bytes), &[-0.5, 0.1, f32::INFINITY]);
    let values = [-1.5f32, 0.1, 3.0e38, 1e-45, -0.0];
    check(F32, &values.map(f32::to_le_bytes), &values);
}

#[test]
fn every_half_becomes_f32() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let f16s: Vec<u16> = bits.iter().copied().filter(|&b| f16::from_bits(b).is_finite()).collect();
    let expected: Vec<f32> = f16s.iter().map(|&b| f16::from_bits(b).to_f32()).collect();
    check(WeightType::F16, &f16s.iter().map(|b| b.to_le_bytes()).collect::<Vec<_>>(), &expected);
    let bf16s: Vec<u16> = bits.into_iter().filter(|&b| bf16::from_bits(b).is_finite()).collect();
    let expected: Vec<f32> = bf16s.iter().map(|&b| bf16::from_bits(b).to_f32()).collect();
    check(WeightType::BF16, &bf16s.iter().map(|b| b.to_le_bytes()).collect::<Vec<_>>(), &expected);
}

#[test]
fn an_element_that_is_not_finite_is_found() {
    let at = 3001;
    let check = |dtype: WeightType, zero: Vec<u8>, wrong: Vec<u8>| {
        let mut elements = vec![zero; 5000];
        elements[at] = wrong.clone();
        elements[at + 100] = wrong;
        let (_folder, weight) = open_one(dtype.name(), &[50, 100], &elements.concat(), 1);
        let error = weight.check_finite().unwrap_err();
        assert!(matches!(error, Error::NotFinite { index, .. } if index == at), "{dtype}: {error}");
        assert_says(&error, &["model.safetensors", "\"w\"", "element 3001 is"]);
    };
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        check(WeightType::F32, vec![0; 4], wrong.to_le_bytes().to_vec());
        check(WeightType::F64, vec![0; 8], f64::from(wrong).to_le_bytes().to_vec());
        check(WeightType::F16, vec![0; 2], f16::from_f32(wrong).to_le_bytes().to_vec());
        check(WeightType::BF16, vec![0; 2], bf16::from_f32(wrong).to_le_bytes().to_vec());
    }
}

#[test]
fn a_computed_tensor() {
    let weight = Weight::from_f32("angles", [2, 2], vec![1.0, -2.0, 0.5, f32::INFINITY]);
    assert_eq!((weight.name(), weight.shape(), weight.dtype()), ("angles", &[2, 2][..], WeightType::F32));
    assert_eq!(weight.to_f32().unwrap(), [1.0, -2.0, 0.5, f32::INFINITY]);
    assert_eq!((weight.file().as_os_str().len(), weight.offset()), (0, 0));
    assert_eq!(bytes_of(&weight).len(), 16);
    assert_says(&weight.check_finite().unwrap_err(), &["\"angles\"", "element 3 is inf"]);
    assert_eq!(format!("{weight:?}"), "angles F32 [2, 2]");
}

/// Elements keep the name and place that they have in the file.
#[test]
fn places_of_elements() {
    let folder = Folder::new();
    folder.write("model.safetensors", &file_of(&[("a", &[2, 3], 1.0), ("b", &[4, 3], 2.0)]));
    let checkpoint = folder.open().unwrap();
    let (a, b) = (checkpoint.get("a").unwrap(), checkpoint.get("b").unwrap());
    let file = folder.path("model.safetensors");
    let check = |weight: &Weight, index: usize, tensor: &str, expected: usize| {
        assert_eq!(weight.place(index), Place { file: &file, tensor, index: expected }, "{weight:?}");
    };
    check(a, 5, "a", 5);
    check(&a.renamed("other"), 5, "a", 5);
    check(&b.rows(1..3), 4, "b", 7);
    check(&b.rows(1..3).reshaped([6]).rows(1..6), 4, "b", 8);
    let stacked = Weight::stacked("router".to_owned(), &[a.renamed("x"), b.rows(1..4), a.clone()]);
    assert_eq!(stacked.shape(), [7, 3]);
    check(&stacked, 0, "a", 0);
    check(&stacked, 5, "a", 5);
    check(&stacked, 6, "b", 3);
    check(&stacked, 14, "b", 11);
    check(&stacked, 15, "a", 0);
    check(&stacked.rows(3..6), 0, "b", 6);
    check(&stacked.rows(3..6), 6, "a", 0);
    let error = stacked.not_finite(7, f64::INFINITY);
    assert_says(&error, &["model.safetensors: tensor \"b\": element 4 is inf; weights must be finite"]);
    let computed = Weight::from_f32("angles", [1], vec![1.0]).not_finite(0, f64::NAN);
    assert_says(&computed, &["\"angles\", computed from the checkpoint's tensors: element 0 is NaN"]);
}

/// Joined tensors read as one, whatever part is wanted.
#[test]
fn joined_tensors() {
    let matrix = |first: usize, rows: usize| {
        Weight::from_f32("part", [rows, 3], (3 * first..3 * (first + rows)).map(|i| i as f32).collect())
    };
    let joined = Weight::stacked("router".to_owned(), &[matrix(0, 2), matrix(2, 1), matrix(3, 4)]);
    let expected: Vec<f32> = (0..21).map(|i| i as f32).collect();
    assert_eq!(joined.to_f32().unwrap(), expected);
    for (start, end) in [(0, 21), (4, 8), (6, 9), (8, 10), (20, 21), (5, 5)] {
        let mut part = Vec::new();
        joined.read_f32(start..end, &mut part).unwrap();
        assert_eq!(part, expected[start..end]);
    }
    assert_eq!(joined.rows(1..4).to_f32().unwrap(), expected[3..12]);
    assert_eq!(joined.rows(1..4).rows(1..2).to_f32().unwrap(), expected[6..9]);
}

/// A file that is written to while it is open is an error, not the end of the process, nor a mixture of old and new numbers.
#[test]
fn a_file_that_changes() {
    let opened = || open_one("F32", &[1000], &[0; 4000], 0);
    let (folder, weight) = opened();
    let path = folder.path("model.safetensors");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let whole = file.metadata().unwrap().len();
    weight.to_f32().unwrap();
    file.set_len(whole - 400).unwrap();
    let error = weight.to_f32().unwrap_err();
    let lengths = format!("{whole} bytes when it was opened, {} now", whole - 400);
    assert_says(&error, &["model.safetensors: the file changed while it was read", &lengths]);

    let (folder, weight) = opened();
    let path = folder.path("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    // Times of modification may be a clock's tick apart.
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&path, &bytes).unwrap();
    assert_says(
        &weight.to_f32().unwrap_err(),
        &[&format!("{whole} bytes, as when it was opened, but written to since")],
    );

    // One that takes its place leaves the open one as it was.
    let (folder, weight) = opened();
    let path = folder.path("model.safetensors");
    let other = folder.path("other");
    std::fs::write(&other, "another file").unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(weight.to_f32().unwrap(), [0.0; 1000]);
}

#[test]
fn a_weight_outlives_its_checkpoint() {
    let (folder, weight) = open_one("F32", &[1], &2.5f32.to_le_bytes(), 0);
    drop(folder);
    assert_eq!(weight.clone().to_f32().unwrap(), [2.5]);
}
