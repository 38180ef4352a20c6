//! The files of an export, made in its staging folder.

use crate::error::Error;
use crate::graph::Graph;
use crate::room;
use crate::side_files::SideFile;
use crate::staging::Staging;
use crate::weights::{self, Plan, links};
use crate::{Options, Weights};
use moh_runtime::Digest;

impl Staging {
    /// Checks that everything fits onto the disk, and makes what needs no conversion: hard links and side files.
    ///
    /// # Errors
    /// [`Error::Room`], [`Error::Link`], [`Error::Exists`] for a link, [`Error::Io`].
    pub(crate) fn begin(
        &mut self,
        plan: &mut Plan,
        graph: &Graph,
        sides: &[SideFile],
        options: &Options,
    ) -> Result<(), Error> {
        if options.digests {
            self.take_digests();
        }
        let sides_length = sides.iter().map(SideFile::length).sum::<Result<u64, Error>>()?;
        room::check(&self.path(""), &self.output(), plan.written(graph) + sides_length)?;
        for linked in &plan.links {
            let path = self.beside_model(&linked.link.file);
            if path.symlink_metadata().is_ok() && !options.force {
                return Err(Error::Exists { path });
            }
            linked.make(&self.path(&linked.link.file), path)?;
        }
        if options.weights == Weights::Link && options.check_links {
            let all = plan.links.iter().map(|linked| linked.link.bytes).sum();
            let told = options.progress.unwrap_or(|_, _| ());
            links::read_all(plan, graph, &|done| told(done, all))?;
        }
        for linked in &plan.links {
            self.add_link(&linked.link.file, linked.link.contents.clone());
        }
        sides.iter().try_for_each(|side| self.write(self.side_path(&side.name), &side.contents()?))
    }

    /// Writes a file beside the model.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn add_file(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.write(self.path(name), bytes)
    }

    /// Writes the weight file, if the model has one.
    ///
    /// # Errors
    /// Those of [`weights::write_data`].
    pub(crate) fn add_data(&mut self, graph: &Graph, plan: &Plan, options: &Options) -> Result<(), Error> {
        let (length, told) = (plan.length(), options.progress.unwrap_or(|_, _| ()));
        let path = self.path(&self.data_name());
        let mut digest = self.wants_digests().then(Digest::default);
        weights::write_data(graph, plan, &path, digest.as_mut(), &|done| told(done, length))?;
        self.note(path, digest.map(Digest::text));
        Ok(())
    }
}
