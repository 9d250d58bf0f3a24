//go:build ignore

/*
 * environ puts variables into its environment and becomes another program. It
 * is started as
 *
 *	/proc/self/fd/3 PROGRAM ARGUMENT...
 *
 * Descriptor 4 has the variables, NAME=VALUE, each with its NUL; a variable
 * takes the place of the one with its name. PROGRAM is looked for as libcontainer
 * does it. environ.go has the other side. No libc: there is none in a container.
 */
#if defined(__x86_64__)
enum { WRITE = 1, CLOSE = 3, PREAD64 = 17, EXECVE = 59, PRCTL = 157, EXIT_GROUP = 231 };

static long call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall"
		: "=a"(result)
		: "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
		: "rcx", "r11", "memory");
	return result;
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall start\n");
#elif defined(__aarch64__)
enum { WRITE = 64, CLOSE = 57, PREAD64 = 67, EXECVE = 221, PRCTL = 167, EXIT_GROUP = 94 };

static long call(long number, long a, long b, long c, long d)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
}

__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x0, sp\n\tbl start\n");
#else
#error "environ knows the system calls of x86_64 and aarch64 only"
#endif

typedef unsigned long size;

enum {
	PROGRAM_FD = 3, BLOCK_FD = 4, STDERR = 2,
	PR_SET_NAME = 15,
	ENOENT = 2, EINTR = 4, ENOEXEC = 8, E2BIG = 7, EACCES = 13, ENOTDIR = 20, ENAMETOOLONG = 36,
	CANNOT_EXECUTE = 126, NOT_FOUND = 127, /* as a shell exits */
	PATH_MAX = 4096,
	BLOCK = 8 << 20, /* more than execve(2) takes */
};

static char block[BLOCK], path[PATH_MAX];

static size length(const char *s)
{
	size n = 0;
	while (s[n])
		n++;
	return n;
}

/* says whether two variables have one name */
static int same_name(const char *a, const char *b)
{
	while (*a && *a == *b && *a != '=')
		a++, b++;
	return *a == '=' && *b == '=';
}

static void say(const char *words) { call(WRITE, STDERR, (long)words, length(words), 0); }

__attribute__((noreturn)) static void fail(const char *program, long error)
{
	const char *why = error == ENOENT || error == ENOTDIR ? "no such file or directory"
		: error == EACCES ? "permission denied"
		: error == ENOEXEC ? "exec format error"
		: error == E2BIG ? "argument list too long"
		: "it cannot be executed";
	say("exec ");
	say(program);
	say(": ");
	say(why);
	say("\n");
	for (;;)
		call(EXIT_GROUP, error == ENOENT || error == ENOTDIR ? NOT_FOUND : CANNOT_EXECUTE, 0, 0, 0);
}

static size read_block(const char *program)
{
	size n = 0;
	while (n < BLOCK - 1) {
		long got = call(PREAD64, BLOCK_FD, (long)(block + n), BLOCK - 1 - n, n);
		if (got == -EINTR)
			continue;
		if (got < 0)
			fail(program, -got);
		if (got == 0)
			return n;
		n += got;
	}
	fail(program, E2BIG);
}

/* Each variable takes the place of its namesake, which is always there. */
static void set(char **env, char *variables, size n)
{
	for (char *variable = variables; variable < variables + n; variable += length(variable) + 1)
		for (char **e = env; *e; e++)
			if (same_name(*e, variable)) {
				*e = variable;
				break;
			}
}

static const char *search_path(char **env)
{
	for (; *env; env++)
		if (same_name(*env, "PATH="))
			return *env + 5;
	return "";
}

/* makes path of a directory and a name; 0 if it is too long */
static int join(const char *directory, size n, const char *name)
{
	size m = length(name);
	if (n + m + 2 > PATH_MAX)
		return 0;
	for (size i = 0; i < n; i++)
		path[i] = directory[i];
	path[n] = '/';
	for (size i = 0; i <= m; i++)
		path[n + 1 + i] = name[i];
	return 1;
}

static int has_slash(const char *name)
{
	while (*name && *name != '/')
		name++;
	return *name;
}

/* Directories that are not absolute are left out, as exec.LookPath of Go does. */
static long execute(char **args, char **env)
{
	if (has_slash(args[0]))
		return -call(EXECVE, (long)args[0], (long)args, (long)env, 0);
	long error = ENOENT;
	for (const char *directory = search_path(env); *directory;) {
		size n = 0;
		while (directory[n] && directory[n] != ':')
			n++;
		if (*directory == '/' && join(directory, n, args[0])) {
			long result = -call(EXECVE, (long)path, (long)args, (long)env, 0);
			if (result == EACCES)
				error = EACCES;
			else if (result != ENOENT && result != ENOTDIR && result != ENAMETOOLONG)
				return result;
		}
		directory += n + (directory[n] == ':');
	}
	return error;
}

__attribute__((noreturn, used)) void start(long *stack)
{
	char **args = (char **)(stack + 1), **env = args + stack[0] + 1;
	call(PRCTL, PR_SET_NAME, (long)"minicri-environ", 0, 0);
	args++;
	if (!*args)
		fail("", ENOENT);
	set(env, block, read_block(*args));
	call(CLOSE, PROGRAM_FD, 0, 0, 0);
	call(CLOSE, BLOCK_FD, 0, 0, 0);
	fail(*args, execute(args, env));
}
