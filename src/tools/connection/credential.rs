//! The credential of a connection: its place, its form, and the guard against a server that repeats it.
//!
//! **Invariant:** the value is read for one request, goes into one header of that request, and into no error, log or
//! record.

use std::sync::Arc;

use base64::prelude::*;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};

use super::credential_program::{CredentialFault, CredentialProgram};
use super::reserved_headers::{is_credential_header, is_reserved_header};
use crate::base::keyed_permits::KeyedPermits;
use crate::base::secret::SecretString;
use crate::base::secret_redactor::SecretRedactor;
use crate::tools::connection_config::ConnectionCredentialConfig;
use crate::tools::header_secrets::list_header_secrets;

/// The checked settings of a credential.
#[derive(Debug)]
pub(super) struct ConnectionCredential {
    config: ConnectionCredentialConfig,
    /// The program that prints the value; `None` for a variable or a file.
    program: Option<CredentialProgram>,
    header: HeaderName,
}

/// A credential that was read for one request.
pub(super) struct ReadCredential {
    pub(super) header: HeaderName,
    pub(super) value: HeaderValue,
    pub(super) guard: EchoGuard,
}

/// A search for a credential in an answer, as it streams.
pub(super) struct EchoGuard {
    redactor: SecretRedactor,
    /// The secrets in small letters, because the names of headers are in small letters.
    folded: Vec<Vec<u8>>,
}

impl ConnectionCredential {
    /// Checks the settings. An error is the key in the credential's table, and the mistake.
    pub(super) fn new(
        config: &ConnectionCredentialConfig,
        programs: &Arc<KeyedPermits>,
    ) -> Result<Self, (String, String)> {
        let wrong = |key: &str, problem: &str| Err((key.to_owned(), problem.to_owned()));
        let places = [config.env.is_some(), config.file.is_some(), !config.command.is_empty()];
        if places.into_iter().filter(|is_given| *is_given).count() != 1 {
            return wrong("", "needs one of `env`, `file` and `command`");
        }
        if config.command.first().is_some_and(|program| !program.starts_with('/')) {
            return wrong("command", "must begin with the absolute path of a program");
        }
        let header = match (&config.basic, &config.header) {
            (Some(_), Some(_)) => return wrong("", "has `basic` and `header`; give one of them"),
            (Some(user), None) => {
                if user.bytes().any(|byte| byte == b':' || !byte.is_ascii_graphic()) {
                    return wrong("basic", "must be a user's name of visible ASCII without `:`");
                }
                header::AUTHORIZATION
            }
            (None, None) => header::AUTHORIZATION,
            (None, Some(name)) => match HeaderName::try_from(name) {
                Ok(name) if !is_reserved_header(&name) => name,
                Ok(name) if name == header::AUTHORIZATION || is_credential_header(&name) => name,
                _ => return wrong("header", "is not the name of a header for credentials"),
            },
        };
        let command = Some(config.command.clone()).filter(|command| !command.is_empty());
        let program = command.map(|command| CredentialProgram::new(command, Arc::clone(programs)));
        Ok(Self { config: config.clone(), program, header })
    }

    pub(super) fn header(&self) -> &HeaderName {
        &self.header
    }

    /// Reads the value, and makes the header.
    ///
    /// # Errors
    /// Returns an error that names the place and never the value.
    pub(super) async fn read_credential(&self) -> Result<ReadCredential, CredentialFault> {
        let secret = match &self.program {
            Some(program) => program.read_value().await?,
            None => self.config.source().read_value().map_err(CredentialFault::Unavailable)?,
        };
        self.make_header(secret).map_err(CredentialFault::Unavailable)
    }

    fn make_header(&self, secret: SecretString) -> Result<ReadCredential, String> {
        let value = secret.expose_secret();
        if !value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
            return Err("it has a character that a header cannot have".to_owned());
        }
        if value.len() < MIN_SECRET_BYTES {
            // A shorter value stands in many answers by chance, so the guard could not protect it.
            return Err("it is shorter than 8 bytes".to_owned());
        }
        let text = match (&self.config.basic, &self.config.header) {
            (Some(user), _) => {
                format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{value}")))
            }
            (None, Some(_)) => value.to_owned(),
            (None, None) => format!("Bearer {value}"),
        };
        let guard = EchoGuard::new(&SecretString::new(&*text), &secret);
        let value = HeaderValue::from_str(&text);
        let mut value = value.map_err(|_| "it cannot be a header's value".to_owned())?;
        value.set_sensitive(true);
        let header = self.header.clone();
        Ok(ReadCredential { header, value, guard })
    }
}

impl EchoGuard {
    /// Creates a guard for a value and the header that is made of it: the value itself is searched for, and each secret
    /// that the header's text has.
    fn new(sent: &SecretString, value: &SecretString) -> Self {
        let mut secrets = list_header_secrets(sent);
        if secrets.iter().all(|secret| secret.expose_secret() != value.expose_secret()) {
            secrets.push(value.clone());
        }
        let folded =
            |secret: &SecretString| secret.expose_secret().to_ascii_lowercase().into_bytes();
        Self {
            redactor: SecretRedactor::for_keys(&secrets),
            folded: secrets.iter().map(folded).collect(),
        }
    }

    /// Returns the part of the body so far that may pass, or `None` if the body contains the credential.
    pub(super) fn pass_frame(&mut self, frame: Bytes) -> Option<Bytes> {
        self.redactor.pass_frame(frame)
    }

    /// Returns the bytes that were held back. The body has ended.
    pub(super) fn pass_rest(self) -> Bytes {
        self.redactor.redact_rest()
    }

    /// Returns true if a header contains the credential, in its name or its value.
    pub(super) fn is_in_header(&self, name: &HeaderName, value: &HeaderValue) -> bool {
        let name = name.as_str().as_bytes();
        self.folded.iter().any(|secret| memchr::memmem::find(name, secret).is_some())
            || self.redactor.contains_secret(value.as_bytes())
    }
}

/// The shortest credential that is searched for in answers, which is the redactor's own limit.
const MIN_SECRET_BYTES: usize = 8;
