//! The credential of a connection: its place and its form.
//!
//! **Invariant:** the value is read for one request, goes into one header of that request or only signs it, and goes into
//! no error, log or record.

use std::sync::Arc;
use std::time::SystemTime;

use base64::prelude::*;
use http::{HeaderName, HeaderValue, Request, header};

use super::aws_signing::AwsSigning;
use super::body::ConnectRequestBody;
use super::client::SendFault;
use super::credential_program::{CredentialFault, CredentialProgram};
use super::reserved_headers::{is_credential_header, is_reserved_header};
use crate::base::keyed_permits::KeyedPermits;
use crate::base::secret::SecretString;
use crate::tools::aws_credential::AwsCredential;
use crate::tools::connection_config::ConnectionCredentialConfig;

/// The checked settings of a credential.
#[derive(Debug)]
pub(super) struct ConnectionCredential {
    config: ConnectionCredentialConfig,
    /// The program that prints the value; `None` for a variable or a file.
    program: Option<CredentialProgram>,
    header: HeaderName,
    /// The signatures that the credential makes; `None` for a credential that is sent in a header.
    signing: Option<Arc<AwsSigning>>,
}

/// A credential that was read for one request.
pub(super) enum ReadCredential {
    /// A header, and the value itself without the form of the header.
    Header { name: HeaderName, value: HeaderValue, secret: SecretString },
    /// A key that signs the request.
    Aws { credential: AwsCredential, signing: Arc<AwsSigning> },
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
        let signing = config.aws.as_ref().map(AwsSigning::new).transpose();
        let signing = signing.map_err(|(key, problem)| (format!("aws.{key}"), problem))?;
        if signing.is_some() && (config.basic.is_some() || config.header.is_some()) {
            return wrong("", "has `aws` beside `basic` or `header`; give one of them");
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
        Ok(Self { config: config.clone(), program, header, signing: signing.map(Arc::new) })
    }

    pub(super) fn header(&self) -> &HeaderName {
        &self.header
    }

    pub(super) fn signing(&self) -> Option<&AwsSigning> {
        self.signing.as_deref()
    }

    /// Reads the value, and makes the header or checks the key.
    ///
    /// # Errors
    /// Returns an error that names the place and never the value.
    pub(super) async fn read_credential(&self) -> Result<ReadCredential, CredentialFault> {
        let secret = match &self.program {
            Some(program) => program.read_value().await?,
            None => self.config.source().read_value().map_err(CredentialFault::Unavailable)?,
        };
        let read = match &self.signing {
            None => self.make_header(secret),
            Some(signing) => {
                let parsed = AwsCredential::parse_valid(&secret, SystemTime::now());
                let signing = Arc::clone(signing);
                let place = self.place();
                parsed
                    .map(|credential| ReadCredential::Aws { credential, signing })
                    .map_err(|problem| format!("{place}: {problem}"))
            }
        };
        read.map_err(CredentialFault::Unavailable)
    }

    /// Returns the name of the variable, the file or the program.
    fn place(&self) -> String {
        let ConnectionCredentialConfig { env, file, command, .. } = &self.config;
        match (env, file) {
            (Some(name), _) => format!("the variable `{name}`"),
            (None, Some(path)) => format!("`{}`", path.display()),
            (None, None) => format!("`{}`", command.first().map_or("", String::as_str)),
        }
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
        let value = HeaderValue::from_str(&text);
        let mut value = value.map_err(|_| "it cannot be a header's value".to_owned())?;
        value.set_sensitive(true);
        Ok(ReadCredential::Header { name: self.header.clone(), value, secret })
    }
}

impl ReadCredential {
    /// Returns the values that no answer may contain.
    pub(super) fn secrets(&self) -> Vec<&SecretString> {
        match self {
            Self::Header { secret, .. } => vec![secret],
            Self::Aws { credential, .. } => credential.secrets(),
        }
    }

    /// Adds the credential to a request that is about to be sent.
    pub(super) async fn authorize_request(
        self,
        request: &mut Request<ConnectRequestBody>,
    ) -> Result<(), SendFault> {
        match self {
            Self::Header { name, value, .. } => {
                request.headers_mut().insert(name, value);
                Ok(())
            }
            Self::Aws { credential, signing } => {
                signing.sign_request(request, &credential).await.map_err(|_| SendFault::Failed)
            }
        }
    }
}

/// The shortest credential that is searched for in answers, which is the redactor's own limit.
const MIN_SECRET_BYTES: usize = 8;
