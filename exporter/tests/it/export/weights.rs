//! Weights that no model may have are refused, however they are laid out in the file.

use super::support::{Case, constant, read, unverified};
use candle_core::{Device, Tensor};
use moh_export::{ElementType, Error, Options};

/// Written as (in, out), that is, transposed; embeddings and convolutions are written as they are stored.
const TRANSPOSED: &str = "blocks.0.mlp.fc1.weight";
const STRAIGHT: &str = "y_embedder.embedding_table.weight";

/// The golden DiT with element (3, 5) of a tensor replaced.
fn spoiled(tensor: &str, value: f32) -> Case {
    let case = Case::new("dit-tiny-75");
    case.rewrite(|name, weight| {
        if name != tensor {
            return weight;
        }
        let mut values = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values[3 * weight.dims()[1] + 5] = value;
        Tensor::from_vec(values, weight.dims(), &Device::Cpu).unwrap()
    });
    case
}

#[test]
fn one_of_the_tensors_is_written_transposed() {
    let case = Case::new("dit-tiny-75");
    case.export(&unverified()).unwrap();
    let model = read(&case.output());
    assert_eq!(constant(&model, &format!("{TRANSPOSED}.T")).dims, [96, 384]);
    assert_eq!(constant(&model, STRAIGHT).dims, [11, 96]);
}

#[test]
fn not_finite() {
    for tensor in [TRANSPOSED, STRAIGHT] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let case = spoiled(tensor, value);
            match case.export(&unverified()) {
                Err(Error::Model(moh_models::Error::NotFinite { file, tensor: found, index, value: shown })) => {
                    assert_eq!((file, found.as_str(), index), (case.weights(), tensor, 3 * 96 + 5));
                    assert_eq!(shown.to_string(), value.to_string());
                }
                other => panic!("{tensor} with {value}: {other:?}"),
            }
            assert!(!case.folder().exists(), "files were left: {:?}", case.left());
        }
    }
}

#[test]
fn beyond_the_range_of_f16() {
    for tensor in [TRANSPOSED, STRAIGHT] {
        let case = spoiled(tensor, -70_000.0);
        match case.export(&Options { dtype: Some(ElementType::F16), ..unverified() }) {
            Err(Error::Range { tensor: found, index, value, ty, .. }) => {
                assert_eq!((found.as_str(), index, value), (tensor, 3 * 96 + 5, -70_000.0));
                assert_eq!(ty, ElementType::F16);
            }
            other => panic!("{tensor}: {other:?}"),
        }
        assert!(!case.folder().exists(), "files were left: {:?}", case.left());
        case.export(&Options { dtype: Some(ElementType::F32), ..unverified() }).unwrap();
    }
}

/// The last number that rounds to bfloat16's largest, and the first that rounds to infinity.
#[test]
fn beyond_the_range_of_bf16() {
    for tensor in [TRANSPOSED, STRAIGHT] {
        let [fits, beyond] = [0x7f7f_7fff, 0x7f7f_8000].map(f32::from_bits);
        let bf16 = Options { dtype: Some(ElementType::BF16), ..unverified() };
        spoiled(tensor, -fits).export(&bf16).unwrap();
        let case = spoiled(tensor, -beyond);
        match case.export(&bf16) {
            Err(Error::Range { tensor: found, value, ty, .. }) => {
                assert_eq!((found.as_str(), value, ty), (tensor, -beyond, ElementType::BF16));
            }
            other => panic!("{tensor}: {other:?}"),
        }
        assert!(!case.folder().exists(), "files were left: {:?}", case.left());
    }
}
