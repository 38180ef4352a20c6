//! Files of torch.save: those of PyTorch itself, and made ones, well-formed and not.

mod archive;
mod arrays;
mod integers;
mod pickle;
mod state;
mod tensors;
mod write;

use super::*;
use write::*;

/// A folder with `model.pth`.
fn folder_of(bytes: &[u8]) -> Folder {
    let folder = Folder::new();
    folder.write("model.pth", bytes);
    folder
}

fn opened(bytes: &[u8]) -> (Folder, Checkpoint) {
    let folder = folder_of(bytes);
    let checkpoint = folder.open().unwrap_or_else(|error| panic!("{error}"));
    (folder, checkpoint)
}

fn refused(bytes: &[u8], parts: &[&str]) -> Error {
    folder_of(bytes).refused(&[&["model.pth: "], parts].concat())
}

fn open_with_key(folder: &Folder, key: &str) -> Result<Checkpoint, Error> {
    crate::presets::open(folder.0.path(), crate::presets::Source::Beside, Some(key), &[])
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.names().collect()
}

const SAVED: [&[u8]; 2] = [include_bytes!("torch/saved.pt"), include_bytes!("torch/protocol4.pt")];

#[test]
fn what_pytorch_saves() {
    for file in SAVED {
        let folder = folder_of(file);
        let checkpoint = folder.open().unwrap();
        assert_eq!(checkpoint.weights_key(), Some("model"));
        let expected =
            ["0.bias", "0.weight", "1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"];
        assert_eq!(names(&checkpoint), expected);
        assert_eq!(checkpoint.get("0.weight").unwrap().shape(), [2, 3]);
        assert_eq!(checkpoint.get("1.num_batches_tracked").unwrap().to_f32().unwrap(), [1.0]);
        assert_eq!(checkpoint.get("1.num_batches_tracked").unwrap().dtype(), WeightType::I64);
    }
}

#[test]
fn views_that_pytorch_saves() {
    let base: Vec<f32> = (0..24u8).map(f32::from).collect();
    for file in SAVED {
        let folder = folder_of(file);
        let checkpoint = open_with_key(&folder, "views").unwrap();
        let check = |name: &str, shape: &[usize], dtype: WeightType, values: &[f32]| {
            let weight = checkpoint.get(name).unwrap_or_else(|| panic!("no {name}"));
            assert_eq!((weight.shape(), weight.dtype()), (shape, dtype), "{name}");
            assert_eq!(weight.to_f32().unwrap(), values, "{name}");
            assert_eq!(weight.file(), folder.path("model.pth"), "{name}");
        };
        use WeightType::*;
        check("whole", &[4, 6], F32, &base);
        let transposed: Vec<f32> = (0..6).flat_map(|i| (0..4).map(move |j| (6 * j + i) as f32)).collect();
        check("transposed", &[6, 4], F32, &transposed);
        check("row", &[6], F32, &base[12..18]);
        check("column", &[4], F32, &[1.0, 7.0, 13.0, 19.0]);
        check("block", &[2, 3], F32, &[8.0, 9.0, 10.0, 14.0, 15.0, 16.0]);
        check("expanded", &[2, 2], F32, &[3.0; 4]);
        check("empty", &[0, 4], F32, &[]);
        check("scalar", &[], F32, &[2.5]);
        for (name, dtype) in [("half", F16), ("brain", BF16), ("double", F64)] {
            check(name, &[6], dtype, &base[..6]);
        }
        check("long", &[2], I64, &[-1.0, (1u64 << 40) as f32]);
        check("bool", &[2], Bool, &[1.0, 0.0]);
        check("parameter", &[6], F32, &base[6..12]);

        let whole = checkpoint.get("whole").unwrap();
        let place = whole.offset() as usize;
        assert_eq!(file[place..place + 96], bytes(&base), "in place");
        assert_eq!(checkpoint.get("row").unwrap().offset(), whole.offset() + 48, "a view of the same bytes");
        assert_eq!(checkpoint.get("column").unwrap().offset(), 0, "a copy");

        let mut loader = Loader::new(&checkpoint);
        for name in ["complex", "sparse", "absent"] {
            loader.weight(name, &[2]);
        }
        let error = loader.finish(|_| true).unwrap_err();
        assert_says(
            &error,
            &[
                "1 missing:\n  \"absent\"",
                "2 unreadable:",
                "\"complex\": elements of type torch.ComplexFloatStorage",
                "\"sparse\": an object of torch._utils._rebuild_sparse_tensor",
            ],
        );
    }
}
