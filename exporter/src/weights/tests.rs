#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::place::Layout;
use moh_models::Weight;

fn write(weight: Weight, ty: ElementType, transposed: bool) -> Result<Vec<u8>, Error> {
    let mut dims = weight.shape().to_vec();
    if transposed {
        dims.reverse();
    }
    let source = Source::Weight { weight, transposed };
    bytes_of(&Initializer { name: "w".to_owned(), ty, dims, source })
}

/// Numbers around 1 and 2 by their distance in steps, and what they are in a type whose 1 and 2 have the bits `one` and `two`: the nearest number, of
/// two equally near ones the even one.
fn rounded(one: u16, two: u16, step: f32) -> [(f32, u16); 7] {
    [
        (1.0, one),
        (1.0 + 0.25 * step, one),
        (1.0 + 0.5 * step, one),
        (1.0 + 0.75 * step, one + 1),
        (1.0 + 1.5 * step, one + 2),
        (-(1.0 + 1.75 * step), 0x8000 | (one + 2)),
        (2.0 - 0.25 * step, two),
    ]
}

#[test]
fn conversion_rounds_to_nearest() {
    let types = [(ElementType::BF16, 0x3f80, 0x4000, 1.0 / 128.0), (ElementType::F16, 0x3c00, 0x4000, 1.0 / 1024.0)];
    for (ty, one, two, step) in types {
        let table = rounded(one, two, step);
        for transposed in [false, true] {
            let values: Vec<f32> = table.iter().map(|(value, _)| *value).collect();
            let bytes = write(Weight::from_f32("w", [1, values.len()], values), ty, transposed).unwrap();
            let found: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            let expected: Vec<u16> = table.iter().map(|(_, bits)| *bits).collect();
            assert_eq!(found, expected, "{ty}, transposed: {transposed}");
        }
    }
}

/// A model file has a largest size. The tensor has no elements to write: only its shape counts.
#[test]
fn weights_that_no_model_file_holds() {
    let tensor = |rows: usize| Initializer {
        name: "w".to_owned(),
        ty: ElementType::F32,
        dims: vec![rows, 1 << 20],
        source: Source::Bytes(Vec::new()),
    };
    let graph = |rows: usize| Graph {
        name: String::new(),
        opset: 21,
        ir_version: 10,
        inputs: Vec::new(),
        outputs: Vec::new(),
        initializers: vec![tensor(rows)],
        nodes: Vec::new(),
        values: Default::default(),
        functions: Vec::new(),
        metadata: Default::default(),
    };
    let place = Place::new(Path::new("m.onnx"), Layout::Flat);
    let planned = |rows, weights| Plan::with(&graph(rows), weights, ElementType::F32, &place);
    assert!(planned(500, Weights::Inline).is_ok());
    let error = planned(512, Weights::Inline).unwrap_err();
    let text = "m.onnx: the weights have 2147483648 bytes, and a model file holds at most 2113929216";
    assert_eq!(error.to_string(), text);
    assert!(planned(512, Weights::Copy).is_ok());
}

/// More columns than one band has.
const ROWS: usize = 20_000;
const COLUMNS: usize = 70;

#[test]
fn bands_of_columns() {
    const { assert!(BAND_BYTES / (4 * ROWS) < COLUMNS && convert::CHUNK_BYTES / (4 * COLUMNS) < ROWS / 2) };
    let value = |row: usize, column: usize| (row * 100 + column) as f32;
    let values = (0..ROWS * COLUMNS).map(|i| value(i / COLUMNS, i % COLUMNS)).collect();
    let bytes = write(Weight::from_f32("w", [ROWS, COLUMNS], values), ElementType::F32, true).unwrap();
    assert_eq!(bytes.len(), ROWS * COLUMNS * 4);
    for (i, found) in bytes.as_chunks::<4>().0.iter().enumerate() {
        assert_eq!(f32::from_le_bytes(*found), value(i % ROWS, i / ROWS), "element {i}");
    }
}

#[test]
fn every_element_is_checked() {
    for transposed in [false, true] {
        for index in [0, 69, 70, 12_345 * COLUMNS + 67, ROWS * COLUMNS - 1] {
            let spoiled = |value: f32, ty| {
                let mut values = vec![1.0; ROWS * COLUMNS];
                values[index] = value;
                write(Weight::from_f32("w", [ROWS, COLUMNS], values), ty, transposed)
            };
            match spoiled(f32::NAN, ElementType::BF16) {
                Err(Error::Model(moh_models::Error::NotFinite { tensor, index: found, value, .. })) => {
                    assert!(tensor == "w" && found == index && value.is_nan(), "{tensor}, {found}, {value}");
                }
                other => panic!("NaN at {index}, transposed: {transposed}: {:?}", other.map(|bytes| bytes.len())),
            }
            match spoiled(65_520.0, ElementType::F16) {
                Err(Error::Range { tensor, index: found, value, .. }) => {
                    assert!(tensor == "w" && found == index && value == 65_520.0, "{tensor}, {found}, {value}");
                }
                other => panic!("65520 at {index}, transposed: {transposed}: {:?}", other.map(|bytes| bytes.len())),
            }
        }
    }
}

/// Infinity is the first number that is not finite by its bits.
#[test]
fn infinity_in_files_of_half_precision() {
    let folder = tempfile::tempdir().unwrap();
    for (stored, infinity) in [(ElementType::F16, 0x7c00_u16), (ElementType::BF16, 0x7f80)] {
        let tensors = vec![("w.weight".to_owned(), vec![8, 16])];
        crate::random::write(folder.path(), "{}", &tensors, stored, 3, true).unwrap();
        let file = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let last = bytes.len() - 2;
        bytes[last..].copy_from_slice(&infinity.to_le_bytes());
        std::fs::write(&file, bytes).unwrap();
        let weight = moh_models::Checkpoint::open(folder.path(), None).unwrap().get("w.weight").unwrap().clone();
        for ty in [ElementType::F32, ElementType::F16, ElementType::BF16] {
            match write(weight.clone(), ty, false) {
                Err(Error::Model(moh_models::Error::NotFinite { index: 127, .. })) => (),
                other => panic!("{stored} to {ty}: {:?}", other.map(|bytes| bytes.len())),
            }
        }
    }
}

/// Two numbers are made at a time.
#[test]
fn random_weights_differ_from_their_neighbours() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = vec![("w.weight".to_owned(), vec![64, 64])];
    crate::random::write(folder.path(), "{}", &tensors, ElementType::F32, 3, true).unwrap();
    let weight = moh_models::Checkpoint::open(folder.path(), None).unwrap().get("w.weight").unwrap().clone();
    let values = weight.to_f32().unwrap();
    let equal = values.windows(2).filter(|pair| pair[0].to_bits() == pair[1].to_bits()).count();
    assert!(equal < values.len() / 100, "{equal} of {} numbers are the one before", values.len());
}

/// More rows and columns than are converted at a time, on both threads.
#[test]
fn every_type_to_every_type() {
    let types = [ElementType::F32, ElementType::F16, ElementType::BF16];
    let (rows, columns) = (300, 700);
    let folder = tempfile::tempdir().unwrap();
    for stored in types {
        let tensors = vec![("w.weight".to_owned(), vec![rows, columns])];
        crate::random::write(folder.path(), "{}", &tensors, stored, 3, true).unwrap();
        let weight = moh_models::Checkpoint::open(folder.path(), None).unwrap().get("w.weight").unwrap().clone();
        let values = weight.to_f32().unwrap();
        for ty in types {
            let element = |i: usize| match ty {
                ElementType::F16 => half::f16::from_f32(values[i]).to_le_bytes().to_vec(),
                ElementType::BF16 => half::bf16::from_f32(values[i]).to_le_bytes().to_vec(),
                _ => values[i].to_le_bytes().to_vec(),
            };
            let plain: Vec<u8> = (0..rows * columns).flat_map(element).collect();
            let across = |i: usize| element(i % rows * columns + i / rows);
            let transposed: Vec<u8> = (0..rows * columns).flat_map(across).collect();
            assert!(write(weight.clone(), ty, false).unwrap() == plain, "{stored} to {ty}");
            assert!(write(weight.clone(), ty, true).unwrap() == transposed, "{stored} to {ty}, transposed");
        }
    }
}

#[test]
fn names_of_links() {
    for name in ["m.onnx_data-00001-of-00002.safetensors", "m.onnx_data-123456-of-123456.safetensors"] {
        assert!(links::is_link_name("m.onnx_data", name), "{name}");
    }
    for name in [
        "m.onnx_data",
        "model-00001-of-00002.safetensors",
        "m.onnx_data-1-of-2.safetensors",
        "m.onnx_data-.safetensors",
    ] {
        assert!(!links::is_link_name("m.onnx_data", name), "{name}");
    }
}
