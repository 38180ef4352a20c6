//! Zip files that torch.save did not write.

use std::io::{Seek, SeekFrom, Write};

use super::*;

/// A file of one tensor of two floats, through the zip's own making.
fn zip_of(change: impl FnOnce(&mut Zip)) -> Vec<u8> {
    let mut zip = Zip::default();
    zip.add("archive/data.pkl", &program(dict(&[("w", floats(2))])));
    change(&mut zip);
    zip.finish()
}

fn data(zip: &mut Zip) {
    zip.add("archive/data/0", &bytes(&[1.0, 2.0]));
}

#[test]
fn well_formed() {
    let plain = zip_of(data);
    let wide = {
        let mut zip = Zip::wide();
        zip.add("archive/data.pkl", &program(dict(&[("w", floats(2))])));
        data(&mut zip);
        zip.finish()
    };
    let mut commented = plain.clone();
    let length = commented.len();
    commented[length - 2..].copy_from_slice(&7u16.to_le_bytes());
    commented.extend(b"comment");
    for file in [plain, wide, commented] {
        let (_folder, checkpoint) = opened(&file);
        assert_eq!(checkpoint.get("w").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    }
}

#[test]
fn beyond_four_gibibytes() {
    let elements = (1i64 << 30) + 4;
    let size = 4 * elements as u64;
    let value = dict(&[
        ("large", tensor(storage("FloatStorage", "0", elements), 0, &[elements], &[1])),
        ("last", tensor(storage("FloatStorage", "0", elements), elements - 2, &[2], &[1])),
        ("after", tensor(storage("FloatStorage", "1", 1), 0, &[1], &[1])),
    ]);
    let mut zip = Zip::wide();
    zip.add("archive/data.pkl", &program(value));
    let folder = Folder::new();
    let mut file = std::fs::File::create(folder.path("model.pth")).unwrap();
    file.write_all(&zip.front()).unwrap();
    let mut at = zip.length();
    for (name, length, last) in [("archive/data/0", size, bytes(&[3.5, 4.5])), ("archive/data/1", 4, bytes(&[5.5]))] {
        let header = zip.add_sparse(name, length, at);
        file.write_all(&header).unwrap();
        at += header.len() as u64 + length;
        file.seek(SeekFrom::Start(at - last.len() as u64)).unwrap();
        file.write_all(&last).unwrap();
    }
    file.write_all(&zip.tail(at)).unwrap();
    drop(file);
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.get("large").unwrap().shape(), [elements as usize]);
    assert_eq!(checkpoint.get("last").unwrap().to_f32().unwrap(), [3.5, 4.5]);
    assert_eq!(checkpoint.get("after").unwrap().to_f32().unwrap(), [5.5]);
    assert!(checkpoint.get("after").unwrap().offset() > u64::from(u32::MAX));
}

#[test]
fn other_formats() {
    let legacy =
        [&[0x80, 2, 0x8a, 0x0a][..], &[0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19], b"."].concat();
    let mut tar = vec![b'x'; 512];
    tar[257..262].copy_from_slice(b"ustar");
    for (file, said) in [
        (&b""[..], "an empty file"),
        (&legacy, "before 1.6: load it in PyTorch and save it again"),
        (&tar, "a tar file"),
        (&file_of(&[("a", &[1], 1.0)]), "a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html>", "neither a zip file nor a pickle"),
    ] {
        assert!(matches!(refused(file, &[said]), Error::NotTorch { .. }));
    }
    let folders = zip_of(|zip| zip.add("other/data.pkl", b"."));
    assert!(matches!(refused(&folders, &["more than one data.pkl"]), Error::NotTorch { .. }));
    let script = zip_of(|zip| zip.add("archive/constants.pkl", b"."));
    assert!(matches!(refused(&script, &["TorchScript"]), Error::NotTorch { .. }));
    let mut arrays = Zip::default();
    arrays.add("a.npy", b"");
    assert!(matches!(refused(&arrays.finish(), &[".npz", "safetensors.numpy.save_file"]), Error::NotTorch { .. }));
    let mut empty = Zip::default();
    empty.add("archive/other", b"");
    assert!(matches!(refused(&empty.finish(), &["a zip file without data.pkl"]), Error::NotTorch { .. }));
}

fn fault(file: &[u8]) -> ArchiveFault {
    match refused(file, &[]) {
        Error::Archive { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn entries_that_are_not_stored() {
    let with = |spoil: fn(&mut write::Fields)| zip_of(|zip| zip.add_with("archive/data/0", &bytes(&[1.0, 2.0]), spoil));
    let name = "archive/data/0".to_owned();
    assert_eq!(fault(&with(|f| f.method = 8)), ArchiveFault::Compressed { name: name.clone(), method: 8 });
    for flag in [1, 1 << 6, 1 << 13] {
        let mut zip = Zip::default();
        zip.add("archive/data.pkl", &program(dict(&[("w", floats(2))])));
        zip.add_with("archive/data/0", &[0; 8], |f| f.flags = flag);
        assert_eq!(fault(&zip.finish()), ArchiveFault::Encrypted { name: name.clone() });
    }
    let lengths = ArchiveFault::Lengths { name: name.clone(), stored: 8, size: 9 };
    assert_eq!(fault(&with(|f| f.size = 9)), lengths);
    let both = |n: u64| {
        let mut zip = Zip::wide();
        zip.add("archive/data.pkl", &program(dict(&[("w", floats(2))])));
        zip.add_with("archive/data/0", &[0; 8], |f| (f.size, f.stored) = (n, n));
        zip.finish()
    };
    for n in [1 << 20, 1 << 40, u64::MAX - 1, u64::MAX] {
        assert!(matches!(fault(&both(n)), ArchiveFault::Truncated { what: "an entry's data", .. }), "{n}");
    }
    assert_eq!(fault(&zip_of(|_| {})), ArchiveFault::Missing { name });
    let twice = zip_of(|zip| (data(zip), data(zip)).0);
    assert!(matches!(fault(&twice), ArchiveFault::Duplicate { .. }));
}

#[test]
fn every_truncation() {
    let file = zip_of(data);
    for length in 1..file.len() {
        let error = refused(&file[..length], &[]);
        assert!(matches!(error, Error::NotTorch { .. } | Error::Archive { .. }), "{length}: {error}");
    }
}

#[test]
fn every_byte_may_be_wrong() {
    let value = dict(&[("w", tensor(storage("FloatStorage", "0", 4), 0, &[2, 2], &[1, 2])), ("v", floats(4))]);
    let good = saved(value, &[&bytes(&[1.0, 2.0, 3.0, 4.0])]);
    let folder = Folder::new();
    for at in 0..good.len() {
        for wrong in [0, 0xff, good[at] ^ 1] {
            let mut file = good.clone();
            file[at] = wrong;
            let path = folder.write("model.pth", &file);
            // What still opens can be read.
            let Ok(checkpoint) = Checkpoint::open(&path, None) else { continue };
            for name in checkpoint.names() {
                let weight = checkpoint.get(name).unwrap();
                assert_eq!(bytes_of(weight).len(), weight.elements() * weight.dtype().bytes());
                weight.to_f32().unwrap();
            }
        }
    }
}

#[test]
fn a_big_endian_file() {
    let of = |order: &[u8]| {
        zip_of(|zip| {
            zip.add("archive/byteorder", order);
            data(zip);
        })
    };
    opened(&of(b"little"));
    assert!(matches!(refused(&of(b"big"), &["should be little, but is \"big\""]), Error::ByteOrder { .. }));
    assert!(matches!(refused(&of(b""), &["\"\""]), Error::ByteOrder { .. }));
}

#[test]
fn directories_that_lie() {
    let good = zip_of(data);
    let end = good.len() - 22;
    let with = |at: usize, value: &[u8]| {
        let mut file = good.clone();
        file[at..at + value.len()].copy_from_slice(value);
        file
    };
    assert_eq!(fault(&with(end + 4, &[1, 0])), ArchiveFault::Parts);
    assert!(matches!(
        fault(&with(end + 10, &[200, 0])),
        ArchiveFault::Signature { .. } | ArchiveFault::Truncated { .. }
    ));
    assert!(matches!(fault(&with(end + 16, &[0xfe, 0xff, 0xff, 0xff])), ArchiveFault::Truncated { .. }));
    assert!(matches!(fault(&with(end + 16, &[0xff; 4])), ArchiveFault::Signature { .. }));
    assert!(matches!(fault(&with(end + 16, &[1, 0, 0, 0])), ArchiveFault::Signature { .. }));
}
