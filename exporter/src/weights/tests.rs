#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

fn write(weight: Weight, ty: ElementType, transposed: bool) -> Result<Vec<u8>, Error> {
    let mut dims = weight.shape().to_vec();
    if transposed {
        dims.reverse();
    }
    let source = Source::Weight { weight, transposed };
    let mut bytes = Vec::new();
    append_initializer(&Initializer { name: "w".to_owned(), ty, dims, source }, &mut bytes)?;
    Ok(bytes)
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
    assert!(Plan::with(&graph(500), Weights::Inline, Path::new("m.onnx")).is_ok());
    let error = Plan::with(&graph(512), Weights::Inline, Path::new("m.onnx")).unwrap_err();
    let text = "m.onnx: the weights have 2147483648 bytes, and a model file holds at most 2113929216";
    assert_eq!(error.to_string(), text);
    assert!(Plan::with(&graph(512), Weights::Copy, Path::new("m.onnx")).is_ok());
}

/// More columns than one band has.
const ROWS: usize = 20_000;
const COLUMNS: usize = 70;

#[test]
fn bands_of_columns() {
    const { assert!(BAND_BYTES / (4 * ROWS) < COLUMNS && CHUNK_BYTES / (4 * COLUMNS) < ROWS) };
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
