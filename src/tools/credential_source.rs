//! The place of a credential. The value is read when it is used, so that it can be replaced.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::base::regular_file::read_secret_file;
use crate::base::secret::SecretString;

/// The place of a header's value. Exactly one place is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CredentialSource {
    /// The name of an environment variable of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// A file, whose last line feed does not belong to the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

impl CredentialSource {
    /// Returns true if exactly one place is given.
    pub fn has_one_place(&self) -> bool {
        self.env.is_some() != self.file.is_some()
    }

    pub fn file_path(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Reads the value.
    ///
    /// # Errors
    /// Returns an error that names the place and never the value.
    pub fn read_value(&self) -> Result<SecretString, String> {
        let value = match (&self.env, &self.file) {
            (Some(name), _) => {
                std::env::var(name).map_err(|_| format!("the variable `{name}` is not set"))?
            }
            (None, Some(path)) => {
                read_secret_file(path).map_err(|error| format!("`{}`: {error}", path.display()))?
            }
            (None, None) => String::new(),
        };
        let value = value.trim_end_matches(['\r', '\n']);
        if value.is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(SecretString::new(value))
    }
}
